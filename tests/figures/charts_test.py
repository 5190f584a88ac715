"""Tests of charts: labels, lines and the numbers that they show."""

from matplotlib.backends import backend_agg
import numpy as np

from vit_jax.figures import charts, results
from vit_jax.run import metrics


def test_curves_of_one_metric_share_a_panel():
  steps = np.array([1, 2])
  names = (
    'grad_norm', 'lr', 'train_loss', 'img_sec_core_train', 'loss_test',
    'accuracy_test', 'num_examples_test', 'accuracy_val', 'bits_test',
  )  # fmt: skip
  values = np.array([0.5, 0.25])
  curves = {}
  for name in names:
    kind = metrics.SHARE if 'accuracy' in name else metrics.Metric()
    curves[name] = results.Curve(steps, values, kind)
  assert charts.curve_panels(curves) == {
    'loss': ['train_loss', 'loss_test'],
    'accuracy': ['accuracy_test', 'accuracy_val'],
    'bits': ['bits_test'],
    'learning rate': ['lr'],
  }
  fig = charts.learning_curves(curves)
  loss, accuracy, *_, no, none = fig.axes
  assert accuracy.get_ylabel() == 'accuracy (%)'
  assert [a.get_visible() for a in (no, none)] == [False, False]
  test, validation = accuracy.lines
  np.testing.assert_array_equal(test.get_ydata(), [50, 25])
  # A split has one colour in all panels.
  assert test.get_color() == loss.lines[1].get_color() != validation.get_color()


def found(confusion, mistakes=()):
  return results.Results(np.asarray(confusion), mistakes)


def test_small_confusion_matrix_has_names_and_counts():
  matrix = [[8, 2, 0], [0, 5, 0], [1, 0, 4]]
  fig = charts.confusion(found(matrix), ('ant', 'bee', 'cow'), 'test')
  assert '17 of 20 correct (85.00 %)' in fig.get_suptitle()
  axes, pairs, _ = fig.axes
  assert [t.get_text() for t in axes.get_xticklabels()] == ['ant', 'bee', 'cow']
  assert {t.get_text() for t in axes.texts} == {'8', '2', '5', '1', '4'}
  image = np.asarray(axes.get_images()[0].get_array())
  np.testing.assert_allclose(image[0], [80, 20, 0])
  assert [t.get_text() for t in pairs.texts] == ['ant → bee: 2', 'cow → ant: 1']


def test_names_are_not_formulas():
  fig = charts.confusion(found([[8, 2], [0, 5]]), (r'$\frac$', '$5 or $6'), 'test')
  backend_agg.FigureCanvasAgg(fig).draw()


def test_large_confusion_matrix_has_pairs_instead_of_names():
  matrix = np.diag(np.full(1000, 50))
  matrix[3, 7] = 9
  names = [f'class {i}' for i in range(1000)]
  axes, pairs, bar = charts.confusion(found(matrix), names, 'test').axes
  assert not axes.texts
  assert len(axes.get_xticks()) < 20
  [label] = pairs.texts
  assert label.get_text() == 'class 3 → class 7: 9'
  # Several classes share a cell, which shows the largest fraction.
  shown = np.asarray(axes.get_images()[0].get_array())
  np.testing.assert_array_equal(shown > 0, np.eye(100, dtype=bool))
  assert '10 x 10 classes' in bar.get_ylabel()


def test_long_names_do_not_overlap():
  names = (
    'Eastern diamondback rattlesnake, adamanteus',
    'sulphur-crested cockatoo, Kakatoe galerita, Cacatua galerita',
  )
  image = np.zeros((8, 8, 3), np.float32)
  wrong = [
    results.Mistake(image, i % 2, 1 - i % 2, 0.9, f'{"name" * 20}{i}.jpg')
    for i in range(8)
  ]
  fig = charts.mistakes(found(np.eye(2), wrong), names, 'test')
  backend_agg.FigureCanvasAgg(fig).draw()
  texts = [fig._suptitle]
  texts += [x for axes in fig.axes for x in (axes.title, axes.xaxis.label)]
  boxes = [text.get_window_extent() for text in texts]
  assert len(boxes) == 17
  for i, box in enumerate(boxes):
    assert not any(box.overlaps(other) for other in boxes[:i])


def test_mistakes_show_predicted_and_true_class():
  image = np.zeros((8, 8, 1), np.float32)
  wrong = [
    results.Mistake(image, 0, 1, 0.876, '/data/test/ant/7.png'),
    results.Mistake(image, 1, 0, 0.5, 'example 3'),
  ]
  fig = charts.mistakes(found(np.eye(2), wrong), ('ant', 'bee'), 'test')
  first, second = fig.axes
  assert first.get_title() == 'predicted with 88 %:\nbee\ntrue: ant'
  assert [a.get_xlabel() for a in (first, second)] == ['7.png', 'example 3']
  none = charts.mistakes(found(np.eye(2)), ('ant', 'bee'), 'test')
  assert none.get_suptitle() == "All images of split 'test' are predicted correctly"
