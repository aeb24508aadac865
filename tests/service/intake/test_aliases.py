"""How sentences name communicators: by what people can say, with the id behind it."""

from __future__ import annotations

import pytest

from ncclscope_service.intake.aliases import with_name

_NAMES = {("j", "0xa1"): "dp-2", ("j", "0xa1/3/0"): "tp-0"}


@pytest.mark.parametrize(
    ("sentence", "comm_id", "said"),
    [
        ("Rank 3 is late in DP group 0xa1 by 5 ms.", "0xa1", "Rank 3 is late in DP group dp-2 (0xa1) by 5 ms."),
        ("communicator 0xa1 lost 5 %", "0xa1", "communicator dp-2 (0xa1) lost 5 %"),
        ("TP group 0xa1/3/0: it hangs.", "0xa1/3/0", "TP group tp-0 (0xa1/3/0): it hangs."),
        ("TP group 0xa1/3/0 hangs.", "0xa1", "TP group 0xa1/3/0 hangs."),
        ("DP group 0xa1#2 hangs.", "0xa1", "DP group 0xa1#2 hangs."),
        ("DP group 0xb2 hangs.", "0xb2", "DP group 0xb2 hangs."),
        ("The clock of node02 was set.", None, "The clock of node02 was set."),
    ],
)
def test_a_sentence_has_the_name_before_the_id_of_its_own_communicator_only(
    sentence: str, comm_id: str | None, said: str
) -> None:
    assert with_name(sentence, "j", comm_id, _NAMES) == said
    assert with_name(sentence, "another job", comm_id, _NAMES) == sentence
