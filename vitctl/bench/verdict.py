"""Which part of a training step is the bottleneck, and the knob that would help: one sentence, from numbers
of this run only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

WORTH = 0.03  # a gain below this is within what two measurements of the same differ by
_MOST = 0.75  # share of the rounds that a faster knob wins
WAITS = 0.10  # share of a step above which waiting is what to mend, even where computing takes longer


@dataclass(frozen=True)
class Trial:
    """A knob of [machine] with another value: seconds of the gradients of one update, and those with the
    run's own value.

    Medians of `rounds` in which both took turns; in `wins` of them the other value was faster.
    """

    knob: str
    value: str
    seconds: float
    own_seconds: float
    rounds: int = 1
    wins: int = 1

    @property
    def gain(self) -> float:
        """How much faster: 0.1 is 10 % more images/s."""
        return self.own_seconds / self.seconds - 1

    @property
    def helps(self) -> bool:
        """Whether it was faster by more than chance: in the median, and in most rounds."""
        return self.gain >= WORTH and self.wins >= _MOST * self.rounds

    @property
    def setting(self) -> str:
        """As it is typed after --set."""
        return f"{self.knob}={self.value}"


@dataclass(frozen=True)
class StepFacts:
    """What was measured of a training step.

    Args:
        split: seconds of a step by part: data, forward, backward, communication, optimizer, log.
        images: of a step, over all processes.
        recipe_batch: images of an update of the recipe.
        workers: loader workers of each process.
        loader: images/s of the loaders of all processes alone, without the step beside; 0: unknown.
        cores: that this process may use.
        precision: of the matrix products.
        bf16_gain: how much faster matrix products are in bf16 than in `precision`, as measured; 0: unknown.
        utilisation: share of the peak that the step's FLOPs reach, and `against` which peak.
        trials: other values of knobs that were measured.
    """

    split: Mapping[str, float]
    images: int
    recipe_batch: int
    workers: int
    cores: int
    precision: str
    loader: float = 0.0
    bf16_gain: float = 0.0
    utilisation: float = 0.0
    against: str = ""
    trials: Sequence[Trial] = field(default=())

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return sum(self.split.values())

    def share(self, part: str) -> float:
        """Of a part in the step."""
        return self.split.get(part, 0.0) / self.seconds

    @property
    def needed(self) -> float:
        """Images/s of a step that does not wait for them."""
        return self.images / (self.seconds - self.split.get("data", 0.0))

    @property
    def best(self) -> Trial | None:
        """The knob that helped most."""
        return max(
            (trial for trial in self.trials if trial.helps), key=lambda trial: trial.gain, default=None
        )


@dataclass(frozen=True)
class Verdict:
    """The part that is the bottleneck, the sentence about it, and what to set ("" where nothing that was
    measured helps).
    """

    part: str
    text: str
    setting: str = ""


def bottleneck(facts: StepFacts) -> Verdict:
    """The bottleneck of a step: a wait where there is one worth mending, else the longest part; and the knob
    that helped.
    """
    waits = facts.share("data") >= WAITS
    keeps_up = facts.workers > 0 and facts.loader >= facts.needed
    if waits and not keeps_up:
        return _with_best(_data(facts), facts)
    found = _longest(facts)
    if waits:
        also = (
            f" A step also waits {facts.share('data'):.0%} of its time for images, though the loader alone "
            f"gives {rate(facts.loader)} "
            f"images/s and the step needs {rate(facts.needed)}: they share the cores."
        )
        found = replace(found, text=found.text + also)
    return found


def _with_best(found: Verdict, facts: StepFacts) -> Verdict:
    """With the knob that made forward and backward faster, which the verdict on another part does not name."""
    best = facts.best
    if best is None:
        return found
    text = f"{found.text} {best.knob} = {best.value} made forward and backward {best.gain:.0%} faster when tried in this run."
    return replace(found, text=text, setting=found.setting or best.setting)


def _longest(facts: StepFacts) -> Verdict:
    """Of the longest part but data; of communication where it is worth a word."""
    part = max((name for name in facts.split if name != "data"), key=lambda name: facts.split[name])
    if part != "communication" and facts.share("communication") >= WAITS:
        part = "communication"
    once = {"communication": _communication, "optimizer": _optimizer, "log": _log}
    return _with_best(once[part](facts), facts) if part in once else _computing(facts, part)


def _data(facts: StepFacts) -> Verdict:
    """What the loader gives alone, and what a step needs that does not wait."""
    begin = f"Data is the bottleneck: a step waits {facts.share('data'):.0%} of its time for images"
    if not facts.workers:
        return Verdict(
            "data",
            f"{begin}, which are made between steps; machine.workers = 1 makes them beside.",
            "machine.workers=1",
        )
    if not facts.loader:
        return Verdict("data", f"{begin}; `vitctl bench data` measures the loader alone.")
    rates = f"the loader alone gives {rate(facts.loader)} images/s with {facts.workers} worker(s), the step needs {rate(facts.needed)}"
    wanted = math.ceil(facts.workers * facts.needed / facts.loader)
    if wanted <= max(facts.cores - 1, 1) and wanted > facts.workers:
        return Verdict(
            "data",
            f"{begin}; {rates}: machine.workers = {wanted} would keep up.",
            f"machine.workers={wanted}",
        )
    return Verdict(
        "data",
        f"{begin}; {rates}: it would take {wanted} workers, too many for {facts.cores} core(s) that also "
        f"compute the step; "
        "`vitctl bench data` tells what takes the time.",
    )


def _communication(facts: StepFacts) -> Verdict:
    share = facts.share("communication")
    double = facts.split["communication"] / (2 * facts.seconds - facts.split["communication"])
    return Verdict(
        "communication",
        f"Communication is the bottleneck: {share:.0%} of a step is the exchange of gradients, once in an "
        f"update whatever its "
        f"size; twice the images a process (schedule.batch_size, with a smaller machine.micro_batch) would "
        f"make it {double:.0%}.",
        f"schedule.batch_size={2 * facts.images}",
    )


def _optimizer(facts: StepFacts) -> Verdict:
    begin = f"The optimizer is the bottleneck: {facts.share('optimizer'):.0%} of a step of {facts.images:,} images"
    once = facts.split["optimizer"]
    if facts.recipe_batch > facts.images:
        rest = (facts.seconds - once) / facts.images * facts.recipe_batch
        return Verdict(
            "optimizer",
            f"{begin}; in an update of the recipe's {facts.recipe_batch:,} images it is "
            f"{once / (rest + once):.1%}: nothing to set.",
        )
    double = once / (2 * facts.seconds - once)
    return Verdict(
        "optimizer",
        f"{begin}, and it takes the same time for any number: schedule.batch_size = {2 * facts.images} would "
        f"make it {double:.0%} "
        "(another batch size is another training).",
        f"schedule.batch_size={2 * facts.images}",
    )


def _log(facts: StepFacts) -> Verdict:
    return Verdict(
        "log",
        f"The record of each step is the bottleneck: {facts.share('log'):.0%} of a step; log.trace = false "
        f"leaves it out, and "
        "`vitctl verify` then has nothing to replay.",
        "log.trace=false",
    )


def _computing(facts: StepFacts, part: str) -> Verdict:
    """Forward or backward: the knob that was faster when tried, else what the precision gives, else the limit
    of the machine.
    """
    begin = f"The {part} pass is the bottleneck: {facts.share(part):.0%} of a step"
    if (best := facts.best) is not None:
        return Verdict(
            part,
            f"{begin}; {best.knob} = {best.value} made forward and backward {best.gain:.0%} faster when "
            "tried in this run.",
            best.setting,
        )
    if facts.precision == "float32" and facts.bf16_gain >= 1 + WORTH:
        return Verdict(
            part,
            f"{begin}; this machine multiplies bf16 {facts.bf16_gain:.1f} times as fast as float32 "
            f"(measured): "
            "machine.precision = 'bf16'.",
            "machine.precision=bf16",
        )
    tried = ", ".join(f"{trial.setting} {trial.gain:+.0%}" for trial in facts.trials)
    said = f"none of the knobs tried helps ({tried})" if tried else "no other value of a knob was measured"
    return Verdict(part, f"{begin}; {said}. The step reaches {facts.utilisation:.0%} of {facts.against}.")


def rate(value: float) -> str:
    """Images/s, as precise as it matters."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
