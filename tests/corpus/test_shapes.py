from __future__ import annotations

from corpus import shapes


def test_the_shape_of_a_line_hides_numbers_names_of_files_and_addresses() -> None:
    shape = shapes.shape_of(b"opening /data/job7/x with 10.0.0.17<4711> at 0x7f00 as 3f9a12, 12 of 30")
    assert shape == "opening /PATH with ADDRESS at P as N, N of N"


def test_shapes_are_bounded() -> None:
    kept = shapes.Shapes()
    for number in range(3000):
        kept.add("".join(chr(ord("g") + int(digit)) for digit in str(number)).encode())
    assert len(kept.counts) == shapes.SHAPE_LIMIT + 1
    assert kept.counts.total() == 3000
