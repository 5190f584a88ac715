"""What other libraries call a setting -> how it is set here, for error messages.

Names come from the command lines of timm, Hugging Face's TrainingArguments and
PyTorch Lightning. Values are flags, or sentences where no flag is needed.
"""

_EPOCHS = '--config.total_epochs'
_STEPS = '--config.total_steps'
_RATE = '--config.base_lr'
_BATCH = '--config.batch, the images per update on all devices together'
_SIZE = '--config.pp.crop'
_DECOUPLED = '--config.optimizer=adam --config.weight_decay=0.05, which is decoupled'
_RESUME = 'the same command resumes the run in --workdir'
_CLASSES = 'the data set decides on the number of classes'
_ACCUMULATE = '--config.accum_steps'
_WORKERS = 'reading needs no setting; see --config.prefetch'
_DTYPE = '--config.model.dtype=auto'
_WARMUP = '--config.warmup_epochs or --config.warmup_steps'
_CLIP = '--config.grad_norm_clip'
_OUT = '--workdir'
_DATA = '--config.dataset'

SYNONYMS = {
  # Length and rate.
  'epochs': _EPOCHS,
  'num_epochs': _EPOCHS,
  'num_train_epochs': _EPOCHS,
  'max_epochs': _EPOCHS,
  'steps': _STEPS,
  'max_steps': _STEPS,
  'lr': _RATE,
  'learning_rate': _RATE,
  'sched': '--config.decay_type',
  'lr_scheduler': '--config.decay_type',
  'lr_scheduler_type': '--config.decay_type',
  'warmup': _WARMUP,
  'warmup_ratio': _WARMUP,
  # Names of Lightning and of the EarlyStoppingCallback of Hugging Face.
  'patience': '--config.early_stopping.patience',
  'early_stopping_patience': '--config.early_stopping.patience',
  'early_stopping_threshold': '--config.early_stopping.min_delta',
  'kfold': '--folds',
  'num_folds': '--folds',
  # Batches and devices.
  'bs': _BATCH,
  'batch_size': _BATCH,
  'per_device_train_batch_size': _BATCH,
  'grad_accum_steps': _ACCUMULATE,
  'gradient_accumulation_steps': _ACCUMULATE,
  'accumulate_grad_batches': _ACCUMULATE,
  'workers': _WORKERS,
  'num_workers': _WORKERS,
  'dataloader_num_workers': _WORKERS,
  'devices': '--config.mesh, by default all devices',
  'amp': _DTYPE,
  'bf16': _DTYPE,
  'fp16': _DTYPE,
  'precision': _DTYPE,
  'grad_checkpointing': '--config.model.transformer.remat=full',
  'gradient_checkpointing': '--config.model.transformer.remat=full',
  # Optimisation.
  'opt': '--config.optimizer',
  'optim': '--config.optimizer',
  'adamw': _DECOUPLED,
  'wd': '--config.weight_decay',
  'beta1': '--config.b1',
  'beta2': '--config.b2',
  'clip_grad': _CLIP,
  'max_grad_norm': _CLIP,
  'gradient_clip_val': _CLIP,
  'llrd': '--config.layer_decay',
  'model_ema': '--config.ema_decay=0.9999',
  'model_ema_decay': '--config.ema_decay',
  # Images and augmentation.
  'image_size': _SIZE,
  'img_size': _SIZE,
  'input_size': _SIZE,
  'crop_size': _SIZE,
  'mixup': '--config.task_options.mixup',
  'mixup_alpha': '--config.task_options.mixup',
  'cutmix': '--config.task_options.cutmix',
  'aa': '--config.pp.randaugment',
  'auto_augment': '--config.pp.randaugment',
  'hflip': '--config.pp.flip',
  'reprob': '--config.pp.random_erasing',
  'smoothing': '--config.label_smoothing',
  'label_smoothing_factor': '--config.label_smoothing',
  # The model.
  'pretrained_model_name_or_path': '--config.pretrained',
  'checkpoint': '--config.pretrained',
  'initial_checkpoint': '--config.pretrained',
  'num_classes': _CLASSES,
  'num_labels': _CLASSES,
  'drop': '--config.model.transformer.dropout_rate',
  'drop_path': '--config.model.transformer.stochastic_depth',
  'drop_path_rate': '--config.model.transformer.stochastic_depth',
  # The run.
  'resume': _RESUME,
  'resume_from_checkpoint': _RESUME,
  'output': _OUT,
  'output_dir': _OUT,
  'logging_steps': '--config.progress_every',
  'eval_steps': '--config.eval_every',
  'save_steps': '--config.checkpoint_every',
  'save_total_limit': '--config.keep_checkpoints',
  'load_best_model_at_end': '--config.best_metric, whose best checkpoint is kept',
  'share': '--host=0.0.0.0, for everyone who can reach this machine',
  'report_to': '--config.trackers=wandb',
  'data_dir': _DATA,
  'data_path': _DATA,
  'dataset_name': _DATA,
}


def hint(name: str) -> str:
  """Returns how the setting of a name in SYNONYMS is made here, for the end of an error."""
  text = SYNONYMS[name]
  return f'use {text}' if text.startswith('--') else text
