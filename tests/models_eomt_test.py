"""Tests of EoMT against Hugging Face's models, with random weights."""

import functools
import json
import shutil

import jax
import numpy as np
from PIL import Image
import pytest
import torch

from tests import torch_models
from vit_jax import models, predict
from vit_jax.commands import predict as predict_command
from vit_jax.evaluators import evaluation
from vit_jax.figures import visualize
from vit_jax.weights import convert

transformers = torch_models.transformers

SIZES = dict(
  hidden_size=16, num_hidden_layers=3, num_attention_heads=2, image_size=16,
  patch_size=4, num_blocks=2, num_queries=5, num_labels=4, train_num_points=50,
)  # fmt: skip


def make_model(name):
  """Returns one of Hugging Face's models, whose parameters are all random."""
  if name == 'dinov3':
    config = transformers.EomtDinov3Config(intermediate_size=24, **SIZES)
    model = transformers.EomtDinov3ForUniversalSegmentation(config)
  else:
    gated = name == 'dinov2, gated'
    config = transformers.EomtConfig(mlp_ratio=3, use_swiglu_ffn=gated, **SIZES)
    model = transformers.EomtForUniversalSegmentation(config)
  return torch_models.randomize(model).eval()


@pytest.fixture(scope='module', params=['dinov2', 'dinov2, gated', 'dinov3'])
def pair(request, tmp_path_factory):
  """A model of Hugging Face; the same model here, and its variables."""
  folder = tmp_path_factory.mktemp('eomt')
  theirs = make_model(request.param)
  theirs.attn_mask_probs.fill_(0)
  theirs.save_pretrained(folder)
  weights = convert.read(str(folder))
  ours = models.make_model(weights.config, num_classes=weights.num_classes)
  return theirs, ours, {'params': weights.params}


def predictions_of(theirs, images, rates):
  """Returns all predictions of Hugging Face's model, the last one last."""
  patch = theirs.config.patch_size
  theirs.grid_size = (images.shape[1] // patch, images.shape[2] // patch)
  theirs.attn_mask_probs.copy_(torch.tensor(rates))
  predictions = []
  predict = theirs.predict

  def record(logits):
    prediction = predict(logits)
    predictions.append(prediction)
    return prediction

  theirs.predict = record
  # A layer of rate 0 has no prediction in evaluation, and keeps the mask before it.
  theirs.training = True
  try:
    with torch.no_grad():
      theirs(torch.tensor(images).permute(0, 3, 1, 2))
  finally:
    theirs.training = False
    del theirs.predict
  return tuple(torch.stack(x).numpy() for x in zip(*predictions))


# Images of the size of the position embeddings, and of as many patches in a rectangle.
@pytest.mark.parametrize(
  'pair, size, rates',
  [
    ('dinov2', (16, 16), (1.0, 1.0)),
    ('dinov2', (8, 32), (0.0, 1.0)),
    ('dinov2', (8, 32), None),
    ('dinov2, gated', (8, 32), None),
    ('dinov3', (16, 16), None),
    ('dinov3', (8, 32), (1.0, 1.0)),
  ],
  indirect=['pair'],
)
def test_predictions_match_hugging_face(pair, size, rates):
  theirs, ours, variables = pair
  images = np.random.RandomState(0).uniform(-1, 1, (2, *size, 3)).astype(np.float32)
  masks, logits = predictions_of(theirs, images, rates or (0.0, 0.0))
  apply = functools.partial(ours.apply, train=False)
  key = jax.random.key(0)
  if rates is None:
    outputs = jax.jit(apply)(variables, images)
    masks, logits = masks[-1:], logits[-1:]
  else:
    apply = functools.partial(
      apply, mask_rates=jax.numpy.array(rates), rngs={'dropout': key}
    )
    outputs = jax.jit(apply)(variables, images)
  assert outputs['masks'].shape == (len(masks), 2, 5, size[0], size[1])
  assert masks.std() > 0.3
  np.testing.assert_allclose(outputs['logits'], logits, atol=1e-5)
  np.testing.assert_allclose(outputs['masks'], masks, atol=1e-5)


def test_hugging_face_reads_written_weights(pair, tmp_path):
  theirs, _, _ = pair
  theirs.attn_mask_probs.fill_(0)
  theirs.save_pretrained(tmp_path / 'theirs')
  convert.convert(str(tmp_path / 'theirs'), str(tmp_path / 'ours'), 'hf')
  written = type(theirs).from_pretrained(tmp_path / 'ours').eval()
  pixels = torch.rand(1, 3, 16, 16)
  for model in (theirs, written):
    model.grid_size = (4, 4)
  with torch.no_grad():
    expected, actual = theirs(pixels), written(pixels)
  assert torch.equal(actual.class_queries_logits, expected.class_queries_logits)
  assert torch.equal(actual.masks_queries_logits, expected.masks_queries_logits)


NAMES = ['sky', 'sea', 'sand', 'tree']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder as of tue-mps, whose model sees windows of 16 pixels, and a photo."""
  folder = tmp_path_factory.mktemp('eomt')
  model = make_model('dinov2')
  model.config.id2label = dict(enumerate(NAMES))
  model.attn_mask_probs.fill_(0)
  with torch.no_grad():  # Queries of different classes, and different masks.
    model.class_predictor.weight.mul_(10)
    model.mask_head.fc3.weight.mul_(10)
  model.save_pretrained(folder / 'weights')
  size = {'shortest_edge': 16, 'longest_edge': None}
  processor = transformers.EomtImageProcessorPil(size=size, do_split_image=True)
  processor.save_pretrained(folder / 'weights')
  colors = np.random.default_rng(0).integers(0, 256, (5, 8, 3), np.uint8)
  photo = Image.fromarray(colors).resize((90, 60), Image.Resampling.BICUBIC)
  photo.save(folder / 'photo.png')  # Resized to 16 x 24 pixels.
  return folder


@pytest.fixture(scope='module')
def released(folder):
  """The predictor of the folder."""
  return predict.load_weights(str(folder / 'weights'))


def class_map_of(weights, photo):
  """Returns the class of each pixel as in transformers."""
  model = transformers.EomtForUniversalSegmentation.from_pretrained(weights).eval()
  processor = transformers.EomtImageProcessorPil.from_pretrained(weights)
  image = Image.open(photo)
  inputs = processor(image, return_tensors='pt')
  assert len(inputs['pixel_values']) == 2  # Windows.
  with torch.no_grad():
    outputs = model(**inputs)
  size = [(image.height, image.width)]
  return processor.post_process_semantic_segmentation(outputs, size)[0].numpy()


def test_maps_of_a_released_folder_are_those_of_hugging_face(
  folder, released, tmp_path, capsys
):
  weights, photo = str(folder / 'weights'), str(folder / 'photo.png')
  expected = class_map_of(weights, photo)
  assert len(np.unique(expected)) > 1
  predict_command.main([f'--weights={weights}', f'--masks={tmp_path}/masks', photo])
  assert 'windows of 16 x 16 over the longer side' in capsys.readouterr().err
  predicted = np.asarray(Image.open(tmp_path / 'masks/photo.png'))
  assert np.mean(predicted == expected) > 0.998  # Pillow rounds resized pixels.
  convert.convert(weights, str(tmp_path / 'run'), 'workdir')
  model = predict.load(tmp_path / 'run')
  assert list(model.class_names) == NAMES
  assert model.task.views == released.task.views
  data = tmp_path / 'data'
  mask = Image.fromarray(expected.astype(np.uint8))
  for name, image in (('images', Image.open(photo)), ('masks', mask)):
    (data / 'test' / name).mkdir(parents=True)
    image.save(data / 'test' / name / 'photo.png')
  (data / 'classes.json').write_text(json.dumps(NAMES))
  values = evaluation.evaluate(model, 'test', str(data))
  assert values['pixel_accuracy'] == pytest.approx(np.mean(predicted == expected))
  convert.convert(str(tmp_path / 'run'), str(tmp_path / 'written'), 'hf')
  again = class_map_of(tmp_path / 'written', photo)
  assert np.mean(again == expected) > 0.998


def test_segments_of_a_released_folder_are_those_of_hugging_face(folder, tmp_path):
  """Images of models of objects are padded with black."""
  weights = str(tmp_path / 'weights')
  theirs = transformers.EomtForUniversalSegmentation.from_pretrained(folder / 'weights')
  with torch.no_grad():
    theirs.class_predictor.weight.mul_(3)
  theirs.save_pretrained(weights)
  size = {'shortest_edge': 16, 'longest_edge': 16}
  processor = transformers.EomtImageProcessorPil(size=size, do_pad=True)
  processor.save_pretrained(weights)
  photo = Image.open(folder / 'photo.png')
  inputs = processor(photo, return_tensors='pt')
  with torch.no_grad():
    outputs = theirs.eval()(pixel_values=inputs['pixel_values'])
  [expected] = processor.post_process_panoptic_segmentation(
    outputs, [(photo.height, photo.width)], threshold=0.3
  )
  model = predict.load_weights(weights)
  predicted = model.outputs([photo])
  masks = outputs.masks_queries_logits.numpy()
  # Pillow rounds resized pixels.
  np.testing.assert_allclose(predicted['masks'], masks, atol=0.01 * abs(masks).max())
  [(numbers, segments)] = model.segment([photo], threshold=0.3)
  names = np.array(['', *(name for name, *_ in segments)])[numbers]
  label_of = {x['id']: NAMES[x['label_id']] for x in expected['segments_info']}
  ids = expected['segmentation'].numpy().astype(int)
  expected_names = np.vectorize(lambda x: label_of.get(x, ''))(ids)
  assert len(np.unique(expected_names)) > 1
  assert np.mean(names == expected_names) > 0.99
  convert.convert(weights, str(tmp_path / 'written'), 'hf')
  written = transformers.EomtImageProcessorPil.from_pretrained(tmp_path / 'written')
  assert (dict(written.size), written.do_pad) == (size, True)


@pytest.mark.parametrize(
  'file, changes, message',
  [
    (
      'preprocessor_config.json',
      {'size': {'shortest_edge': 16, 'longest_edge': 16}},
      'windows need the length of the shorter side',
    ),
    (
      'preprocessor_config.json',
      {
        'size': {'shortest_edge': 16, 'longest_edge': 16},
        'do_split_image': False,
        'do_pad': False,
      },
      'preprocessor_config.json.*do_pad is False .* the model takes one shape: set do_pad',
    ),
    (
      'preprocessor_config.json',
      {
        'size': {'shortest_edge': 20, 'longest_edge': 20},
        'do_split_image': False,
        'do_pad': True,
      },
      'squares of 20 pixels, but the position embeddings are for images of .16, 16.',
    ),
    ('config.json', {'num_queries': 7}, 'num_queries=7, but the weights have 5'),
    ('config.json', {'num_upscale_blocks': 5}, 'num_upscale_blocks=5, but the weights'),
    ('config.json', {'num_blocks': 1}, 'num_blocks=1, but the weights have 2'),
    ('config.json', {'patch_size': 8}, r'patches.size=\(4, 4\), but .* says \(8, 8\)'),
    ('config.json', {'model_type': 'eomt_dinov3'}, "model_type is 'eomt_dinov3', but"),
    ('config.json', {'model_type': 'dinov2'}, "model_type is 'dinov2', but must be"),
  ],
)
def test_files_that_contradict_the_weights_are_named(
  folder, tmp_path, file, changes, message
):
  weights = tmp_path / 'weights'
  shutil.copytree(folder / 'weights', weights)
  path = weights / file
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
  with pytest.raises(ValueError, match=message):
    predict.load_weights(str(weights))


def test_layers_with_queries_are_counted_without_config_json(folder, tmp_path):
  shutil.copytree(folder / 'weights', tmp_path / 'weights')
  (tmp_path / 'weights/config.json').unlink()
  weights = convert.read(str(tmp_path / 'weights'), num_heads=2)
  assert weights.config.num_query_layers == SIZES['num_blocks']


def test_figures_of_attention_are_left_out(folder, released):
  photos = [str(folder / 'photo.png')]
  with pytest.raises(ValueError, match='model=Eomt has queries among its tokens'):
    visualize.figures(released, photos, names=['attention_rollout'])
  [figure] = visualize.figures(released, photos, names=['segmentation']).values()
  assert figure.legends
