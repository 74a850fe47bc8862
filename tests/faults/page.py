"""The table of all kinds, and the page."""

from collections.abc import Sequence

HEAD = "| fault | bed | cases | detected in (s) | named rightly | recovered | steps lost | wrong |"
INTRODUCTION = """\
# Faults

Faults that were injected into real runs: two float32 ranks on two nodes, a save every 10 iterations, `--max-restarts`,
`--hang-timeout 30`. `make faults` makes this page. Times are medians, from the fault to the first word of the run on
it, on a machine with two cores that does other work, too. Steps lost are those since the newest checkpoint, at most.
"Recovered" counts the ends that the kind asks for without a person: most train on to the end, others must end and say
why. "Wrong" counts cases with a wrong culprit, steps that were lost beyond the newest checkpoint, and losses with other
bits than those of a run without a fault.
"""


def table(results, kinds) -> list[str]:
    """Lines of the table, by kind and bed."""
    lines = [HEAD, "|" + " --- |" * 8]
    for kind in kinds:
        for bed in dict.fromkeys(one.bed for one in results):
            cases = [one for one in results if (one.kind, one.bed) == (kind.name, bed)]
            if cases:
                lines.append(_row(kind, bed, cases))
            elif bed in kind.absent:
                lines.append(f"| {kind.what} | {bed} | - | {kind.absent[bed]} | | | | |")
    return lines


def _row(kind, bed, cases) -> str:
    seconds = sorted(one.detected_s for one in cases if one.detected_s is not None)
    told = f"{seconds[len(seconds) // 2]:.1f}" if seconds else "-"
    counts = (
        *(sum(one.is_named for one in cases), sum(one.is_recovered for one in cases)),
        *(max(one.lost_steps for one in cases), sum(bool(one.wrong) for one in cases)),
    )
    return f"| {kind.what} | {bed} | {len(cases)} | {told} | {' | '.join(map(str, counts))} |"


def page(results, kinds, lacks) -> str:
    """The whole page: introduction, sums, table, and cases that are not as they should be."""
    recovered, wrong = sum(one.is_recovered for one in results), sum(bool(one.wrong) for one in results)
    named = sum(one.is_named for one in results)
    sums = f"{len(results)} cases: {recovered} recovered, {named} named rightly, {wrong} wrong."
    beds = [f"No cases on {bed}: {lack}." for bed, lack in lacks.items() if lack]
    parts = [
        INTRODUCTION,
        sums,
        *beds,
        "\n".join(table(results, kinds)),
        *_exceptions(results),
        *_missing(results, kinds),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _exceptions(results) -> Sequence[str]:
    bad = [one for one in results if not one.is_good]
    lines = [f"- {one.kind} on {one.bed}, case {one.number}: {'; '.join([*one.wrong, one.seen])}" for one in bad]
    return ["## Not as it should be", "\n".join(lines)] if bad else []


def _missing(results, kinds) -> Sequence[str]:
    known = {(one.kind, one.bed) for one in results}
    lines = []
    for kind in kinds:
        beds = [bed for bed in kind.beds if (kind.name, bed) not in known]
        if beds:
            lines.append(f"- {kind.name}: {', '.join(beds)}")
    return ["## Not tried yet", "\n".join(lines)] if lines else []
