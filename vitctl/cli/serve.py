"""`vitctl serve`: predictions over HTTP."""

import sys
from typing import Annotated

import typer

from vitctl.cli.flags import Flags, Set, image_recipe, takes_flags

_LOCAL = ("127.0.0.1", "::1", "localhost")


@takes_flags
def serve(
    *,
    flags: Flags,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0: any free one", min=0, max=65_535)] = 8000,
    top: Annotated[int, typer.Option("--top", help="Number of classes per image, by default", min=1)] = 5,
    batch: Annotated[
        int,
        typer.Option(
            "--batch",
            help="Most images per forward pass; above 1 the last digits depend on the other images",
            min=1,
            max=4096,
        ),
    ] = 1,
    max_wait: Annotated[
        float,
        typer.Option("--max-wait", help="Milliseconds that a batch waits for more images", min=0, max=10_000),
    ] = 2.0,
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            help="Seconds that requests are still answered after SIGTERM, while /health says 503",
            min=0,
            max=600,
        ),
    ] = 1.0,
    set_: Set = None,
) -> None:
    """Answer images sent over HTTP with their classes.

    --from also takes an exported .onnx file. Answers are those of predict. A browser shows a page to try it.
    SIGTERM and Ctrl-C finish the requests under way.

    For example: vitctl serve --from RUN
                 curl -F image=@photo.jpg http://127.0.0.1:8000/predict
    Guide: docs/serve.md
    """
    from vitctl.cli.show.console import fetch_weights, waiting
    from vitctl.errors import LaunchError

    with waiting("starting"):
        from vitctl import __version__
        from vitctl.jobs.inputs.classifier import open_classifier
        from vitctl.recipe.schema import Evaluate

        try:
            from vitctl.jobs.http_server import Application, listen, open_batcher, run_server
        except ImportError as error:
            raise LaunchError(
                "serve", f"{error.name} is not installed", "run: pip install 'vitctl[serve]'"
            ) from None

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    recipe = image_recipe("serve", flags, set_).recipe
    assert isinstance(recipe, Evaluate)
    with listen(host, port) as listener:  # first, because reading weights may take minutes
        if "://" in recipe.weights.source:
            fetch_weights(recipe.weights.source, on_stderr=True)
        opened = open_classifier(recipe, note=note)
        note(f"weights: {opened.path} ({opened.text})")
        for text in opened.warnings:
            note(f"warning: {text}")
        batcher = open_batcher(recipe, opened, batch, max_wait / 1000)
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        if host not in _LOCAL:
            note("warning: open to anyone who reaches it; put a proxy with TLS and passwords before it")
        note(f"serving on {address}: a page, /predict, /health, /metrics, /openapi.json")
        shown = address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        note(f"try: curl -F image=@photo.jpg {shown}/predict")
        try:
            run_server(Application(batcher, top), __version__, listener, drain)
        except KeyboardInterrupt:
            note("stopped")
