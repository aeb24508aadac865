"""Help in sections: options and subcommands under headings, in place of one long list."""

from __future__ import annotations

from collections.abc import Mapping

import click


class SectionedCommand(click.Command):
    """A command whose help lists its options by section; what no section names comes last."""

    sections: Mapping[str, tuple[str, ...]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of options for each section."""
        records = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        named = {name for names in self.sections.values() for name in names}
        rest = tuple(str(name) for name in records if name not in named)
        for heading, names in {**self.sections, "Other": rest}.items():
            rows = [record for name in names if (record := records.get(name)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def sectioned(sections: Mapping[str, tuple[str, ...]]) -> type[SectionedCommand]:
    """The class of a command with these sections: heading to names of parameters."""
    return type("Sectioned", (SectionedCommand,), {"sections": sections})
