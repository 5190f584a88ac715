"""How images are prepared, against transformers' image processors and timm's."""

import io
import json

from etils import epath
import numpy as np
from PIL import Image
import pytest
from sklearn import datasets
from torchvision import transforms

from tests import torch_models
from vit_jax import checkpoint, predict, preprocess
from vit_jax.configs import common, vit as vit_config
from vit_jax.layers import positions
from vit_jax.run import config as run_config
from vit_jax.weights import convert, fitting, preparation

# Imported through torch_models, which sets up their environment.
timm = torch_models.timm
transformers = torch_models.transformers
torch = torch_models.torch

INPUT = (32, 32)
IMAGENET = {'image_mean': [0.485, 0.456, 0.406], 'image_std': [0.229, 0.224, 0.225]}
CROP = {'height': 32, 'width': 32}
SHORT_SIDE = {'size': {'shortest_edge': 36}, 'do_center_crop': True, 'crop_size': 32}
# What preprocessor_config.json says, by a name of the case.
HF = {
  'vit': {'image_processor_type': 'ViTImageProcessor', 'size': CROP},
  'vit, list': {'image_processor_type': 'ViTImageProcessor', 'size': [24, 32]},
  'vit, number': {'feature_extractor_type': 'ViTFeatureExtractor', 'size': 32},
  'vit, crop': {'image_processor_type': 'ViTImageProcessor', **SHORT_SIDE},
  'deit, number': {
    'feature_extractor_type': 'DeiTFeatureExtractor', 'size': 36, 'crop_size': 32
  },
  'deit': {'image_processor_type': 'DeiTImageProcessor', **SHORT_SIDE},
  'dino v2': {'image_processor_type': 'BitImageProcessor', **SHORT_SIDE, **IMAGENET},
  'dino v3': {'image_processor_type': 'DINOv3ViTImageProcessorFast', 'size': CROP},
  'beit': {'image_processor_type': 'BeitImageProcessor', 'size': CROP},
  'clip, number': {
    'feature_extractor_type': 'CLIPFeatureExtractor', 'size': 32, 'crop_size': 32
  },
  'clip, no crop': {
    'image_processor_type': 'CLIPImageProcessor', 'size': CROP, 'do_center_crop': False
  },
  'siglip': {'image_processor_type': 'SiglipImageProcessor', 'size': CROP},
  'lanczos': {'image_processor_type': 'ViTImageProcessor', 'size': CROP, 'resample': 1},
  'not normalised': {
    'image_processor_type': 'ViTImageProcessor', 'size': CROP, 'do_normalize': False
  },
  'not rescaled': {
    'image_processor_type': 'ViTImageProcessor', 'size': CROP, 'do_rescale': False,
    'image_mean': [123.7, 116.3, 103.5], 'image_std': [58.4, 57.1, 57.4],
  },
  'rescaled to [0, 2]': {
    'image_processor_type': 'ViTImageProcessor', 'size': CROP,
    'rescale_factor': 1 / 127.5, 'image_mean': [1.0] * 3, 'image_std': [1.0] * 3,
  },
  'one number': {
    'image_processor_type': 'ViTImageProcessor', 'size': CROP,
    'image_mean': 0.45, 'image_std': 0.25,
  },
}  # fmt: skip
TIMM = {
  'timm, center': {'crop_pct': 0.9, 'interpolation': 'bicubic'},
  'timm, squash': {'crop_pct': 1.0, 'crop_mode': 'squash', 'interpolation': 'bilinear'},
  'timm, squash and crop': {'crop_pct': 0.8, 'crop_mode': 'squash'},
  'timm, not square': {'input_size': [3, 32, 48], 'crop_pct': 0.875},
}


def files_in(folder, **contents):
  """Writes JSON files, and returns what `preparation.read` calls `sibling`."""
  for name, content in contents.items():
    (folder / f'{name}.json').write_text(json.dumps(content))
  return epath.Path(folder).joinpath


def photographs():
  """Returns JPEGs: wide, square, tall, smaller than the input, of odd sizes."""
  china, flower = datasets.load_sample_images().images
  for x in (
    china[:300, :600], china[:400, :400], flower[:427, 200:342],
    flower[100:120, 300:325], china[:101, :203],
  ):  # fmt: skip
    buffer = io.BytesIO()
    Image.fromarray(x).save(buffer, 'JPEG', quality=90)
    yield buffer.getvalue()


def pixels_of(how: preparation.Preparation, encoded: bytes) -> np.ndarray:
  """Returns an image as a model's input, with the normalisation of its weights."""
  pp = common.get_config().pp
  with pp.ignore_type():
    pp.update(how.fields(how.crop or INPUT))
  pixels = preprocess.prepare(encoded, None, pp).numpy()
  mean, std = how.by_channel(3).values()
  return ((pixels + 1) / 2 - mean) / std


def assert_near(got, want, std):
  """Compares pixels in levels of 255: 0.5 in the mean, rounding aside."""
  assert got.shape == want.shape
  levels = np.abs(got - want) * std * 255
  assert levels.mean() < 0.5
  assert levels.max() < 12


@pytest.mark.parametrize('backend', ['pil', 'torchvision'])
@pytest.mark.parametrize('name', HF)
def test_pixels_match_transformers(tmp_path, name, backend):
  sibling = files_in(tmp_path, preprocessor_config=HF[name])
  if 'DINOv3' in str(HF[name]) and backend == 'pil':
    backend = 'torchvision'  # The only one.
  theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend=backend)
  how = preparation.read(sibling, 'hf')
  assert how.source == 'preprocessor_config.json'
  for encoded in photographs():
    image = Image.open(io.BytesIO(encoded))
    want = np.asarray(theirs(image, return_tensors='pt')['pixel_values'][0])
    assert_near(pixels_of(how, encoded), want.transpose(1, 2, 0), np.array(how.std))


@pytest.mark.parametrize('name', TIMM)
def test_pixels_match_timm(tmp_path, name):
  stated = {'input_size': [3, *INPUT], **TIMM[name]}
  how = preparation.read(files_in(tmp_path, config={'pretrained_cfg': stated}), 'timm')
  resolved = timm.data.resolve_data_config(pretrained_cfg=stated)
  transform = timm.data.create_transform(**resolved)
  for encoded in photographs():
    want = transform(Image.open(io.BytesIO(encoded))).permute(1, 2, 0).numpy()
    assert_near(pixels_of(how, encoded), want, np.array(how.std))


@pytest.mark.parametrize('mode', ['shortest', 'squash'])
def test_pixels_match_torchvision_as_open_clip_uses_it(tmp_path, mode):
  stated = {'resize_mode': mode, 'interpolation': 'bicubic', 'size': 32}
  content = {'preprocess_cfg': stated, 'model_cfg': {'vision_cfg': {'image_size': 224}}}
  how = preparation.read(files_in(tmp_path, open_clip_config=content), 'open_clip')
  size = 32 if mode == 'shortest' else INPUT
  filters = transforms.InterpolationMode.BICUBIC
  transform = transforms.Compose(
    [transforms.Resize(size, filters), transforms.CenterCrop(32), transforms.ToTensor()]
  )
  mean, std = how.by_channel(3).values()
  assert mean == (0.48145466, 0.4578275, 0.40821073)
  for encoded in photographs():
    want = transform(Image.open(io.BytesIO(encoded)).convert('RGB')).permute(1, 2, 0)
    assert_near(pixels_of(how, encoded), (want.numpy() - mean) / std, np.array(std))


def test_processor_config_is_preferred(tmp_path):
  """As in transformers; version 5 writes only this file for CLIP."""
  sibling = files_in(
    tmp_path,
    preprocessor_config=HF['vit'],
    processor_config={'image_processor': HF['dino v2'], 'processor_class': 'Some'},
  )
  how = preparation.read(sibling, 'hf')
  assert (how.size, how.crop, how.source) == (36, INPUT, 'processor_config.json')
  assert str(how) == 'shorter side 36, bicubic, centre crop 32 x 32'


def test_longest_sides_are_for_detectors(tmp_path):
  torch_models.hf_model().save_pretrained(tmp_path)
  sides = {'shortest_edge': 8, 'longest_edge': 16}
  content = {**HF['clip, number'], 'size': sides, 'crop_size': 8}
  files_in(tmp_path, preprocessor_config=content)
  with pytest.raises(ValueError, match='longer side of images to 16'):
    convert.read(str(tmp_path))


def test_one_line_names_the_pixels(tmp_path, capsys):
  torch_models.hf_model(image_size=32).save_pretrained(tmp_path)
  files_in(tmp_path, preprocessor_config=HF['dino v2'])
  model = predict.load_weights(str(tmp_path))
  output = capsys.readouterr()
  line = "weights' preprocessor_config.json says: shorter side 36, bicubic, centre crop"
  assert line in output.err
  assert not output.out
  assert model.config.pp.resize == 36


def test_keys_that_are_not_read_are_named(tmp_path, caplog):
  content = {**HF['vit'], 'processor_class': 'P', 'sharpness': 2, '_notes': 1}
  preparation.read(files_in(tmp_path, preprocessor_config=content), 'hf')
  assert 'preprocessor_config.json are not read: sharpness' in caplog.text


def test_the_type_of_the_model_chooses_the_defaults(tmp_path):
  sibling = files_in(
    tmp_path, preprocessor_config={'do_resize': True}, config={'model_type': 'dinov2'}
  )
  how = preparation.read(sibling, 'hf')
  assert (how.size, how.crop, how.interpolation) == (224, (224, 224), 'bicubic')
  assert preparation.read(tmp_path.joinpath, 'pth') is None


@pytest.mark.parametrize(
  'change, message',
  [
    ({'resample': 4}, 'resample is 4'),
    ({'size': {'longest_edge': 64}}, 'size is .*longest_edge'),
    ({'size': {'max_height': 64, 'max_width': 32}}, 'size is .*max_height'),
    ({'size': {'shortest_edge': 36}}, 'size is .* without do_center_crop'),
    ({'do_center_crop': True, 'crop_size': 40}, 'smaller than the crop'),
    ({'do_center_crop': True, 'crop_size': {'height': 40}}, 'crop_size is'),
    ({'do_resize': False, 'do_center_crop': True}, 'do_resize is False'),
    ({'do_thumbnail': True}, 'do_thumbnail is True'),
    ({'crop_pct': 0.9}, 'crop_pct is 0.9'),
    ({'rescale_offset': True}, 'rescale_offset is True'),
    ({'pad_size': 40}, 'pad_size is 40'),
    ({'ensure_multiple_of': 8}, 'ensure_multiple_of is 8'),
    ({'image_std': [0.0] * 3}, 'image_std is'),
    ({'rescale_factor': 0}, 'rescale_factor is 0'),
    ({'size': {'height': 10**9, 'width': 8}}, 'resized to 1,000,000,000 pixels'),
    ({'image_processor_type': 'DetrImageProcessor', 'do_center_crop': True},
     'crop_size is missing'),
    ({'image_processor_type': 'OtherImageProcessor'}, 'image_mean is missing'),
  ],
)  # fmt: skip
def test_what_cannot_be_followed_is_an_error(tmp_path, change, message):
  content = {**HF['vit'], 'resample': 2, **change}
  sibling = files_in(tmp_path, preprocessor_config=content)
  with pytest.raises(ValueError, match=f'preprocessor_config.json.*{message}'):
    preparation.read(sibling, 'hf')


@pytest.mark.parametrize(
  'naming, file, content, message',
  [
    ('timm', 'config', {'pretrained_cfg': {'crop_mode': 'border'}}, 'crop_mode'),
    ('timm', 'config', {'pretrained_cfg': {'crop_pct': 1.1}}, 'smaller than the crop'),
    ('timm', 'config', {'pretrained_cfg': {'crop_pct': 1e-9}}, 'resized to'),
    ('open_clip', 'open_clip_config', {'preprocess_cfg': {'resize_mode': 'longest'}},
     'resize_mode'),
    ('open_clip', 'open_clip_config', {'preprocess_cfg': {'mode': 'L'}}, 'mode'),
    ('open_clip', 'open_clip_config', {'model_cfg': {'vision_cfg': {'image_size': 0}}},
     'image_size is 0'),
  ],
)  # fmt: skip
def test_what_timm_and_open_clip_alone_can_do_is_an_error(
  tmp_path, naming, file, content, message
):
  with pytest.raises(ValueError, match=f'{file}.json.*{message}'):
    preparation.read(files_in(tmp_path, **{file: content}), naming)


@pytest.mark.parametrize('registers', [0, 4])
def test_dino_runs_at_its_crop_as_in_transformers(tmp_path, registers):
  """Its positions are of 518 x 518 pixels, here of 36 x 36, its crop is smaller."""
  sizes = dict(
    image_size=36, patch_size=4, hidden_size=12, num_hidden_layers=1,
    num_attention_heads=2, mlp_ratio=2,
  )  # fmt: skip
  if registers:
    config = transformers.Dinov2WithRegistersConfig(num_register_tokens=4, **sizes)
    theirs = transformers.Dinov2WithRegistersModel(config)
  else:
    theirs = transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
  torch_models.randomize(theirs).eval().save_pretrained(tmp_path)
  files_in(tmp_path, preprocessor_config={**HF['dino v2'], 'crop_size': 20})
  model = convert.read(str(tmp_path))
  assert model.image_size == (36, 36)
  image = torch.randn(1, 3, 20, 20, generator=torch.Generator().manual_seed(0))
  with torch.no_grad():
    tokens = theirs.embeddings(image)[:, -25:]
    want = tokens - theirs.embeddings.patch_embeddings(image)
  at_crop = fitting.at_crop(model)
  assert at_crop.image_size == (20, 20)
  table = at_crop.params['Transformer']['posembed_input']['pos_embedding']
  np.testing.assert_allclose(table[:, 1:], want, atol=1e-5)
  # Another size is resized to, too.
  other = convert.read(str(tmp_path), image_size=(20, 28))
  fields = other.preparation.fields(other.image_size)
  assert (fields['crop'], fields['resize']) == ((20, 28), 36)
  image = torch.zeros(1, 3, 20, 28)
  with torch.no_grad():
    tokens = theirs.embeddings(image)[:, -35:]
    want = tokens - theirs.embeddings.patch_embeddings(image)
  table = other.params['Transformer']['posembed_input']['pos_embedding']
  np.testing.assert_allclose(table[:, 1:], want, atol=1e-5)


def test_bicubic_resizing_of_positions_is_pytorchs():
  table = np.random.default_rng(0).normal(size=(1, 1 + 7 * 5, 3))
  grid = torch.tensor(table[:, 1:].reshape(1, 7, 5, 3)).permute(0, 3, 1, 2)
  for new_grid in (3, 4), (9, 11), (16, 3):
    for antialias in (False, True):
      want = torch.nn.functional.interpolate(
        grid, new_grid, mode='bicubic', antialias=antialias
      )
      got = positions.resize_bicubic(table, (7, 5), new_grid, antialias)
      np.testing.assert_array_equal(got[:, :1], table[:, :1])
      want = want.permute(0, 2, 3, 1).reshape(1, -1, 3).numpy()
      np.testing.assert_allclose(got[:, 1:], want, atol=1e-9)


def test_an_npz_keeps_it_in_its_notes(tmp_path):
  theirs = torch_models.hf_model(image_size=32)
  theirs.save_pretrained(tmp_path / 'hf')
  files_in(tmp_path / 'hf', preprocessor_config={**HF['dino v2'], 'resample': 1})
  npz = tmp_path / 'some.npz'
  _, notes = convert.convert(str(tmp_path / 'hf'), str(npz))
  assert any('cannot hold' in note and 'preparation' in note for note in notes)
  how = convert.read(str(npz)).preparation
  assert how.source == 'some.npz.json'
  want = convert.read(str(tmp_path / 'hf')).preparation
  assert how.fields(INPUT) == want.fields(INPUT)
  file = tmp_path / 'some.npz.json'
  stored = json.loads(file.read_text())
  for change, message in (
    ({'interpolation': 'box'}, 'preparation.interpolation is'),
    ({'blur': 1}, 'preparation.blur'),
  ):
    stored['preparation'] = change
    file.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=message):
      convert.read(str(npz))


def test_fine_tuning_names_the_flags_for_the_same_pixels(tmp_path, caplog):
  torch_models.hf_model(image_size=32).save_pretrained(tmp_path)
  files_in(tmp_path, preprocessor_config={**HF['siglip'], 'image_std': [0.4] * 3})
  model = convert.read(str(tmp_path))
  options = dict(expected=model.params, model_config=model.config)
  pp = common.get_config().pp
  flags = '--config.pp.interpolation=bicubic --config.pp.antialias=True'
  for changes, warns in (
    ({'interpolation': 'bicubic', 'antialias': True}, False),
    ({}, True),
  ):
    pp.update(changes)
    fitting.transferable(str(tmp_path), prepared=preparation.from_pp(pp), **options)
    assert (flags in caplog.text) == warns
    pp.update(interpolation='bilinear', antialias=False)


def test_fine_tuning_prepares_images_as_the_weights_say(tmp_path, capsys):
  torch_models.hf_model(image_size=32).save_pretrained(tmp_path)
  files_in(tmp_path, preprocessor_config=HF['dino v2'])

  def prepared(argument, stored=None, **pp):
    config = vit_config.get_config(argument)
    config.pretrained = str(tmp_path)
    config.pp.update(pp)
    config = checkpoint.with_model(config, stored)
    config = checkpoint.with_preparation(config, stored)
    run_config.check_values(run_config.complete(config))
    return config

  run = prepared('pretrained,digits')
  line = "weights' preprocessor_config.json says: shorter side 36, bicubic"
  assert line in capsys.readouterr().err
  used = preparation.from_pp(run.pp)
  stated = convert.read(str(tmp_path)).preparation
  assert used.fields(INPUT) == stated.fields(INPUT)
  assert (used.crop, used.size, used.interpolation) == (INPUT, 36, 'bicubic')
  pp = prepared('pretrained,digits', crop=64, interpolation='lanczos').pp
  assert (pp.crop, pp.resize, pp.interpolation) == (64, 72, 'lanczos')
  # A resumed run does not need the weights.
  stored = json.loads(run.to_json())
  (tmp_path / 'preprocessor_config.json').unlink()
  assert prepared('pretrained,digits', stored).pp == run.pp
  for pp in (
    prepared('pretrained,digits,64').pp,
    prepared('pretrained,digits', match_pretrained=False, crop=64).pp,
  ):
    assert (pp.crop, pp.resize, pp.antialias) == (64, None, False)


def test_other_sizes_keep_the_share_of_the_crop():
  how = preparation.Preparation(256, crop=(224, 224), antialias=True)
  assert how.at_size((448, 448)).fields((448, 448)) == {
    'crop': (448, 448), 'resize': 512, 'resize_mode': 'squash', 'antialias': True,
    'interpolation': 'bilinear', 'crop_rounding': 'down', 'jpeg_shrink': False,
  }  # fmt: skip
  detector = preparation.Preparation(800, longest_side=1333)
  assert detector.at_size((64, 96)) == preparation.Preparation(crop=(64, 96))
