"""What to set for which NCCL version, and where NCCL would fall back in silence."""

from __future__ import annotations

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.nccl_settings.advice import (
    NcclVersion,
    Verdict,
    default_subsystems,
    export_lines,
    read_version,
    remark_on_log_directory,
    remarks_on_environment,
    stamped_levels,
    subsystem_mask,
    version_of_code,
    wanted,
)

VERSIONS = ["2.8.4", "2.12.12", "2.13.4", "2.16.2", "2.16.5", "2.18.3", "2.21.5", "2.22.3", "2.23.4", "2.26.2",
            "2.26.3", "2.27.5", "2.28.9", "2.30.3", "2.30.4", "2.30.7"]  # fmt: skip


def version(text: str) -> NcclVersion:
    found = read_version(text)
    assert found is not None
    return found


def changes(nccl: str, environment: dict[str, str], *, with_exports: bool = False) -> list[tuple[str, str]]:
    remarks = remarks_on_environment(version(nccl), environment, with_exports=with_exports)
    return [(remark.about, remark.text) for remark in remarks if remark.verdict is Verdict.CHANGE]


def changed(nccl: str, **differing: str) -> list[tuple[str, str]]:
    """What must change where all is set as advised but for these."""
    return changes(nccl, {**wanted(version(nccl)), **{f"NCCL_{name}": value for name, value in differing.items()}})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("2.27.5+cuda12.9", (2, 27, 5)),
        ("2.8.4", (2, 8, 4)),
        ("v2.30", (2, 30, 0)),
        (" 2.28.3.", None),
        ("12", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_versions_are_read_as_people_and_wheels_write_them(text: str, parts: tuple[int, int, int] | None) -> None:
    found = read_version(text)
    assert (None if found is None else (found.major, found.minor, found.patch)) == parts


def test_the_number_of_the_library_is_its_version() -> None:
    assert [str(version_of_code(code)) for code in (22705, 21903, 2804, 20908, 23007)] == [
        "2.27.5",
        "2.19.3",
        "2.8.4",
        "2.9.8",
        "2.30.7",
    ]


@pytest.mark.parametrize("nccl", VERSIONS)
@pytest.mark.parametrize("calls", [False, True])
def test_what_is_advised_is_right_for_its_version(nccl: str, calls: bool) -> None:
    remarks = remarks_on_environment(version(nccl), wanted(version(nccl), calls=calls), with_exports=True)
    assert [remark for remark in remarks if remark.verdict is Verdict.CHANGE] == []
    right = {remark.about for remark in remarks if remark.verdict is Verdict.RIGHT}
    assert {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"} <= right


@pytest.mark.parametrize("nccl", VERSIONS)
def test_only_names_that_the_version_knows_are_advised(nccl: str) -> None:
    for calls in (False, True):
        mask = subsystem_mask(version(nccl), wanted(version(nccl), calls=calls)["NCCL_DEBUG_SUBSYS"])
        assert mask.unknown == ()
        assert {"INIT", "COLL"} <= mask.names


@pytest.mark.parametrize(
    ("nccl", "subsystems"),
    [
        ("2.18.3", "INIT,COLL,TUNING,GRAPH,ENV,NET"),
        ("2.21.5", "INIT,COLL,TUNING,GRAPH,ENV,NET,BOOTSTRAP"),
        ("2.30.2", "INIT,COLL,TUNING,GRAPH,ENV,NET,BOOTSTRAP"),
        ("2.30.7", "INIT,COLL,TUNING,GRAPH,ENV,NET,BOOTSTRAP,DESTROY"),
    ],
)
def test_each_version_is_asked_for_what_it_has(nccl: str, subsystems: str) -> None:
    assert wanted(version(nccl))["NCCL_DEBUG_SUBSYS"] == subsystems


def test_calls_are_asked_for_where_the_version_has_them() -> None:
    assert wanted(version("2.27.5"), calls=True)["NCCL_DEBUG"] == "TRACE"
    assert wanted(version("2.27.5"), calls=True)["NCCL_DEBUG_SUBSYS"].endswith(",CALL")
    assert wanted(version("2.12.12"), calls=True) == wanted(version("2.12.12"))


def test_stamps_are_asked_for_from_2_26_2_on_and_fractions_from_2_26_3_on() -> None:
    assert "NCCL_DEBUG_TIMESTAMP_FORMAT" not in wanted(version("2.25.1"))
    assert wanted(version("2.26.2"))["NCCL_DEBUG_TIMESTAMP_FORMAT"] == "[%F %T] "
    assert wanted(version("2.26.3"))["NCCL_DEBUG_TIMESTAMP_FORMAT"] == "[%F_%T.%6f]_"


def test_the_lines_to_paste_mean_the_same_to_a_shell() -> None:
    variables = wanted(version("2.26.2"), log_file="/a b/nccl.%h.%p.log")
    words = [shlex.split(line) for line in export_lines(variables)]
    assert [word[0] for word in words] == ["export"] * len(variables)
    assert dict(word[1].split("=", 1) for word in words) == variables


@pytest.mark.parametrize(
    ("nccl", "default"),
    [
        ("2.16.2", {"INIT"}),
        ("2.16.5", {"INIT", "ENV"}),
        ("2.22.3", {"INIT", "ENV"}),
        ("2.23.4", {"INIT", "ENV", "BOOTSTRAP"}),
    ],
)
def test_an_empty_environment_is_told_the_default_of_its_version(nccl: str, default: set[str]) -> None:
    assert default_subsystems(version(nccl)) == default
    found = changes(nccl, {})
    assert [about for about, _ in found][:2] == ["NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"]
    assert ("NCCL_DEBUG_SUBSYS", "COLL is off: it tells the operations themselves") in found
    texts = [remark.text for remark in remarks_on_environment(version(nccl), {})]
    assert f"its default in {nccl} is {','.join(sorted(default))}" in texts


def test_a_name_that_2_30_7_does_not_know_resets_the_mask_in_silence() -> None:
    mask = subsystem_mask(version("2.30.7"), "INIT,COLL,COLLECTIVES")
    assert (mask.is_reset, mask.unknown, mask.names) == (True, ("COLLECTIVES",), default_subsystems(version("2.30.7")))
    (reset, *_) = changed("2.30.7", DEBUG_SUBSYS="INIT,COLL,DESTROY,COLLECTIVES")
    assert re.search("does not know 'COLLECTIVES'.*takes? the default.*in silence.*no operations", reset[1])


def test_older_versions_ignore_a_name_that_they_do_not_know() -> None:
    mask = subsystem_mask(version("2.30.4"), "INIT,COLL,DESTROY,COLLECTIVES")
    assert (mask.is_reset, mask.unknown) == (False, ("COLLECTIVES",))
    assert mask.names == {"INIT", "COLL", "DESTROY"}
    assert subsystem_mask(version("2.27.5"), "COLL,DESTROY").names == {"COLL"}
    assert changed("2.27.5", DEBUG_SUBSYS="INIT,COLL,DESTROY") == []


def test_blanks_between_names_hide_a_name_from_versions_before_2_30_7() -> None:
    assert subsystem_mask(version("2.27.5"), "INIT, COLL").names == {"INIT"}
    assert subsystem_mask(version("2.30.7"), "init, coll").names == {"INIT", "COLL"}


def test_a_caret_inverts_a_list() -> None:
    names = subsystem_mask(version("2.18.3"), "^P2P,ALLOC").names
    assert "COLL" in names
    assert not {"P2P", "ALLOC", "ALL"} & names
    assert subsystem_mask(version("2.18.3"), "^ALL").names == set()


def test_destroy_is_missed_from_2_30_3_on_only() -> None:
    assert changed("2.30.2", DEBUG_SUBSYS="INIT,COLL") == []
    ((about, text),) = changed("2.30.3", DEBUG_SUBSYS="INIT,COLL")
    assert about == "NCCL_DEBUG_SUBSYS"
    assert text.startswith("DESTROY is off")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "job's output"),
        ("/dev/stdout", "job's output"),
        ("/logs/nccl.log", "tear each other's lines"),
        ("/logs/%h.%r.%p", "%r stays as it is"),
        ("~/nccl.%h.%p", "does not know ~"),
    ],
)
def test_a_log_file_that_loses_lines_must_change(value: str, why: str) -> None:
    ((about, text),) = changed("2.27.5", DEBUG_FILE=value)
    assert about == "NCCL_DEBUG_FILE"
    assert why in text


def test_output_that_is_not_flushed_is_told_from_2_13_on() -> None:
    assert "does not flush" in changed("2.13.4", DEBUG_FILE="")[0][1]
    assert "does not flush" not in changed("2.12.12", DEBUG_FILE="")[0][1]


def test_a_directory_that_nccl_cannot_write_to_sends_the_log_elsewhere() -> None:
    remark = remark_on_log_directory("/x/%h.%p", "missing")
    assert remark.verdict is Verdict.CHANGE
    assert "does not exist" in remark.text


def test_levels_that_leave_out_info_leave_operations_without_a_time() -> None:
    assert stamped_levels(version("2.27.5"), None).names == {"WARN"}
    assert stamped_levels(version("2.26.1"), "ALL").names == set()
    assert "INFO" in stamped_levels(version("2.27.5"), "^WARN").names
    for value in ("WARN", "", "^INFO"):
        assert changed("2.27.5", DEBUG_TIMESTAMP_LEVELS=value)[0][0] == "NCCL_DEBUG_TIMESTAMP_LEVELS"
    assert len(changed("2.30.7", DEBUG_TIMESTAMP_LEVELS="ALL,DEBUG")) == 2
    assert changed("2.30.4", DEBUG_TIMESTAMP_LEVELS="ALL,DEBUG") == []


@pytest.mark.parametrize(
    ("nccl", "value", "why"),
    [
        ("2.26.2", "[%F %T.%6f] ", "wrong digits of the second: leave"),
        ("2.26.2", "[%F %T.%9f] ", "division by zero"),
        ("2.27.5", "%T ", "without year"),
        ("2.27.5", "%F_%T.%6f", "without a blank behind"),
        ("2.27.5", "%F_%I:%M:%S_", "look like those of the morning"),
        ("2.27.5", "", "turns time stamps off"),
        ("2.27.5", "%F %T" + "x" * 251, "over 255"),
        ("2.27.5", "%F %T.%3f %6f", "once only"),
    ],
)
def test_a_stamp_that_cannot_be_used_must_change(nccl: str, value: str, why: str) -> None:
    ((about, text),) = changed(nccl, DEBUG_TIMESTAMP_FORMAT=value)
    assert about == "NCCL_DEBUG_TIMESTAMP_FORMAT"
    assert why in text


@pytest.mark.parametrize(
    "value", ["%s.%6f ", "%c_", "%F_%r_", "%Y%m%d-%H%M%S ", "[%F %T.%6f]", "%FT%T%z ", "%b %d %T ", "%D %T "]
)
def test_a_stamp_that_the_reader_understands_is_left_as_it_is(value: str) -> None:
    assert changed("2.27.5", DEBUG_TIMESTAMP_FORMAT=value) == []


def test_ranges_that_are_turned_off_matter_where_exports_are_used() -> None:
    environment = {**wanted(version("2.28.9")), "NCCL_NVTX_DISABLE": "1"}
    assert changes("2.28.9", environment) == []
    assert changes("2.28.9", environment, with_exports=True)[0][0] == "NCCL_NVTX_DISABLE"
    assert changes("2.28.2", environment, with_exports=True) == []


def test_a_log_that_begins_with_the_first_warning_is_told() -> None:
    environment = {**wanted(version("2.27.5")), "NCCL_DEBUG": "WARN", "NCCL_WARN_ENABLE_DEBUG_INFO": "1"}
    texts = [remark.text for remark in remarks_on_environment(version("2.27.5"), environment)]
    assert any("begins at the first warning" in text for text in texts)


@given(
    st.builds(NcclVersion, st.just(2), st.integers(4, 32), st.integers(0, 20)),
    st.dictionaries(
        st.sampled_from([*wanted(NcclVersion(2, 30, 7)), "NCCL_NVTX_DISABLE", "NCCL_WARN_ENABLE_DEBUG_INFO"]),
        st.text(max_size=40),
    ),
)
def test_any_value_gets_a_remark_and_none_an_exception(nccl: NcclVersion, environment: dict[str, str]) -> None:
    remarks = remarks_on_environment(nccl, environment)
    assert {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"} <= {remark.about for remark in remarks}
