"""Tests of temperature scaling."""

import numpy as np
import pytest
import scipy.special

from vit_jax.evaluators import calibration


@pytest.mark.parametrize('exclusive', [True, False])
@pytest.mark.parametrize('temperature', [0.5, 3.0])
def test_the_temperature_of_the_labels_is_recovered(exclusive, temperature):
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 2, (20_000, 4))
  if exclusive:  # Labels are drawn from the calibrated probabilities.
    shares = scipy.special.softmax(logits, axis=1)
    classes = (rng.random((20_000, 1)) > shares.cumsum(1)).sum(1)
    labels = classes.clip(max=3)[:, None] == np.arange(4)
  else:
    labels = rng.random(logits.shape) < scipy.special.expit(logits)
  found = calibration.fit(temperature * logits, labels, exclusive)
  np.testing.assert_allclose(found, temperature, rtol=0.03)
  # The derivative of the loss vanishes at the minimum.
  losses = []
  for factor in (0.999, 1, 1.001):
    scaled = temperature * logits / (found * factor)
    if exclusive:
      losses.append(-scipy.special.log_softmax(scaled, axis=1)[labels].mean())
    else:
      losses.append(
        -np.log(scipy.special.expit(np.where(labels, scaled, -scaled))).mean()
      )
  assert losses[1] == min(losses)


def test_images_without_one_label_do_not_count():
  logits = np.array([[1.0, 0], [1, 0], [0, 2], [5, 5]])
  labels = np.array([[1, 0], [0, 1], [0, 1], [1, 1]]) > 0
  assert calibration.fit(logits, labels, True) == calibration.fit(
    logits[:3], labels[:3], True
  )
  with pytest.raises(ValueError, match='no image with one label.*--calibrate'):
    calibration.fit(logits[3:], labels[3:], True)
  with pytest.raises(ValueError, match='no temperature from 0.01.*without a mistake'):
    calibration.fit(logits[:1], labels[:1], True)


def test_a_temperature_is_for_one_step(tmp_path):
  stored = calibration.Calibration(1.5, 6, 'val', 10)
  calibration.store(tmp_path, stored)
  assert calibration.stored(tmp_path, 6) == stored
  assert calibration.stored(tmp_path, 9) is None
  assert calibration.stored(tmp_path / 'other', 6) is None
  path = tmp_path / 'calibration.json'
  whole = path.read_text()
  for text in (whole.replace('1.5', '2.5'), '{"temperature": 1.5}', '[]', whole[:-3]):
    path.write_text(text)
    with pytest.raises(ValueError, match='calibration.json.*damaged'):
      calibration.stored(tmp_path, 6)


@pytest.mark.parametrize('temperature', [-1.0, 0.0, float('nan'), 1e9, '2', None])
def test_a_temperature_of_a_stranger_is_checked(temperature, tmp_path):
  strange = calibration.Calibration(temperature, 6, 'val', 10)
  calibration.store(tmp_path, strange)  # With the right hash.
  with pytest.raises(ValueError, match='calibration.json.*damaged'):
    calibration.stored(tmp_path, 6)
