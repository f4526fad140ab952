"""`vitctl weights`."""

from typing import Annotated

import typer


def weights(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One of the list"),
    ] = None,
) -> None:
    """List published weights that --from takes by name, or show one.

    --from also takes timm:NAME and hf:ORGANISATION/NAME.

    For example: vitctl weights dinov2_b14
    Guide: docs/weights.md
    """
    from vitctl.cli.show.console import say, show_table
    from vitctl.jobs.inputs.checks import start_recipe
    from vitctl.models.weights.names import PUBLISHED, TERMS, find_published

    if name is None:
        rows = [
            (key, f"{row.parameters:,.1f} M", str(row.image_size), row.licence.partition(",")[0], row.trained)
            for key, row in PUBLISHED.items()
        ]
        show_table(("name", "size", "pixels", "licence", "trained on"), rows, left=None)
        say("\nvitctl weights NAME   address, licence, published numbers, and the line to type")
        return
    row = find_published(name)
    login = f"accept the terms at {row.page}, and set HF_TOKEN" if row.gated else "not needed"
    facts = {
        "address": row.address,
        "trained": row.trained,
        "size": f"{row.parameters:,.1f} million parameters, {row.image_size} pixels",
        "feature": row.feature,
        "recipe": start_recipe(name)[0] or "finetune (the paper's)",
        "licence": row.licence + (f" ({TERMS[row.licence]})" if row.licence in TERMS else ""),
        "login": login,
        "published": row.number or "nothing that vitctl knows of",
    }
    show_table((name, ""), list(facts.items()), left=None)
    say(f"\nvitctl finetune --from {name} --data PHOTOS")
