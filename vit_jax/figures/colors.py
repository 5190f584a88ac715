"""Colours that colour-blind people can tell apart, and grey.

Source: Okabe and Ito, "Color Universal Design".
"""

BLUE, VERMILION, GREEN, PURPLE = '#0072B2', '#D55E00', '#009E73', '#CC79A7'
ORANGE, SKY, YELLOW = '#E69F00', '#56B4E9', '#F0E442'
BLACK, GREY = '#000000', '#777777'
# Colours of lines on white, and of frames and grounds under black text.
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
FRAMES = (ORANGE, SKY, GREEN, YELLOW, VERMILION, PURPLE, BLUE)


def of_line(number: int) -> str:
  """Returns the colour of a line, numbered from 0."""
  return LINES[number % len(LINES)]
