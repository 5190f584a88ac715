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


def of_class(number: int) -> tuple[int, int, int]:
  """Returns the colour of a number from 0 to 255, which is black for 0.

  The numbers of the development kit of "The PASCAL Visual Object Classes Challenge": their
  bits are dealt to red, green and blue in turn, the lowest to the highest bit of a colour.
  """
  color = [0, 0, 0]
  for place in range(8):
    for channel in range(3):
      bit = number >> (3 * place + channel) & 1
      color[channel] |= bit << (7 - place)
  return color[0], color[1], color[2]
