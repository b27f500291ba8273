"""Can the signals of an exchange deadlock, let a PE read too early, or overwrite too early? A model to ask.

What every PE does in a stream such as "F1 F2 B2 B1" (forward and backward passes of one layer, by epoch),
written in the steps of `weak_memory.py`. What a step stands for in the kernels:

    model                kernels
    wait released        device.wait in steps.wait_free: the peer is through with the backward before this one
    put counts           device.put_values in schedule.exchange_counts_kernel; "signal counted" follows
    wait counted         device.wait_all there; "read counts" is what _offsets loads
    put rows             device.put_rows and put_words in steps.put_part, to places that follow from
                         the counts, and from where the peer has room (`Script.base`)
    put results          the stores of gemm.store_to_rows (TILE_OUT) to the results of the sources, and
                         of steps.return_dots beside them
    signal               tl.atomic_xchg(sem="release", scope="sys") of device.put_signal
    wait arrived         device.wait_all in steps.wait_rows: the words of all sources of the tile
    read rows            the loads of forward_tile and backward_tile (TILE_IN) after wait_rows
    wait returned        device.wait_all in combine_results_kernel; "read results" is what follows
    backward             whatever reads rows of the pass later, wherever it runs (dW)
    release              exchange.release_kernel, in stream order behind the last of these; of a forward
                         the place of its rows, which later passes take
    the stream           what the host launches

A release covers the stores of its task. That it covers earlier tasks too is used for one thing only: a
release comes behind the release before it in the same word. How the warps, parts and columns of one PE come
to have one signal is not in here: mutants of the kernels show it in the emulator (`test_gluon_kernel.py`).

Rows come in units, `units` of each source at most, of which `per_tile` make a tile: received units lie one
behind the other, source after source, so that a tile may hold units of several sources, and where a unit
lies differs from epoch to epoch. The content of a place is a tag: exchange, epoch, sender, unit. Every
reading must find exactly its own. Passes of the second exchange all have their rows in one place, and both
exchanges their results (`ResultBuffers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.lancet_kernels.kernels.protocol.weak_memory import (
    LOW,
    PAUSE,
    READ,
    SEND,
    WAIT,
    Message,
    Step,
    System,
)

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Config:
    """One system to explore.

    Attributes:
        stream: passes of the layer on every PE.
        units: of rows from a source to a peer, at most. per_tile: units of a tile.
        programs: resident on each PE.
        gradients: a backward sends gradients through a second exchange, as moe_backward does; else it only
            reads what the forward left, and stands for any later reader. Counts are not exchanged for it.
        sparse: how many units there are depends on epoch, source and peer; else all are there.
        broken: what is left out or done wrong (`test_protocol.CAUGHT`), or "" for the protocol as it is.
    """

    stream: str
    ranks: int = 2
    units: int = 1
    per_tile: int = 2
    programs: int = 1
    gradients: bool = False
    sparse: bool = False
    broken: str = ""

    def passes(self) -> list[tuple[str, int]]:
        return [(launch[0], int(launch[1:])) for launch in self.stream.split()]

    def filled(self, epoch: int, source: int, peer: int) -> int:
        """How many units source sends to peer: the counts."""
        return (epoch + source + 2 * peer) % (self.units + 1) if self.sparse else self.units

    def received(self, epoch: int, peer: int) -> list[tuple[int, int]]:
        """(source, unit) of every unit that a peer receives, in the order in which they lie."""
        sources = range(self.ranks)
        return [(source, unit) for source in sources for unit in range(self.filled(epoch, source, peer))]

    def arrivals(self, epoch: int, peer: int) -> list[list[tuple[int, int]]]:
        """The same, tile by tile."""
        units = self.received(epoch, peer)
        return [units[i : i + self.per_tile] for i in range(0, len(units), self.per_tile)]

    def sent(self, epoch: int, source: int) -> list[tuple[int, int]]:
        """(owner, unit) of every unit that a source sends, in order: its results lie so."""
        owners = range(self.ranks)
        return [(owner, unit) for owner in owners for unit in range(self.filled(epoch, source, owner))]

    def chunk(self, epoch: int, source: int, owner: int, tile: int) -> int:
        """schedule.chunk_number, of one expert on each PE."""
        before = sum(self.filled(epoch, other, owner) for other in range(source))
        first_send = sum(self.filled(epoch, source, other) for other in range(owner))
        return first_send // self.per_tile + 2 * owner + tile - before // self.per_tile


def build(config: Config) -> System:
    """The system of all PEs."""
    script = Script(config)
    launches = [script.launches(rank) for rank in range(config.ranks)]
    names = [f"{name}{list(rest)}" for name, _, *rest in script.places]
    return System(launches, script.messages, names, script.needed_until, show, config.programs)


# In a tag: of the second exchange.
GRADIENTS = 1 << 15


def show(value: int) -> str:
    of = "gradients of " if value & GRADIENTS else ""
    return f"({of}epoch {value >> 16}, of PE {value >> 8 & 127}, unit {value & 255})" if value else "nothing"


class Task:
    """Writes the steps of one task, and knows which stores a release at this point covers."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.steps: list[Step] = []
        self.covered = 0

    def wait(self, conditions: list[tuple[int, int]], text: str) -> None:
        self.steps.append((WAIT, tuple(conditions), f"waits for {text}"))

    def read(self, reads: list[tuple[int, int]], text: str) -> None:
        self.steps.append((READ, tuple(reads), f"reads {text}"))

    def put(self, key: Key, value: int) -> None:
        name, peer, *index = key
        text = f"{show(value)} in PE {peer}'s {name}{index}"
        message = self.script.message(Message(self.script.place(*key), value, text))
        self.covered |= message
        self.steps.append((SEND, message, f"puts {text}"))

    def signal(self, key: Key, word: int) -> int:
        covers = 0 if self.script.config.broken == "relaxed signal" else self.covered
        name, peer, *index = key
        text = f"PE {peer}'s {self.script.exchange}{name}{index} := {word >> LOW}"
        message = self.script.message(Message(self.script.place(*key), word, text, True, covers))
        self.steps.append((SEND, message, f"signals {text}"))
        return message


class Script:
    """Writes the launches of every PE."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.exchange = ""
        self.places: dict[Key, int] = {}
        self.messages: list[Message] = []
        self.earlier: dict[tuple[str, Key], int] = {}
        self.needed_until: dict[int, dict[int, tuple[int, int]]] = {}

    def tag(self, epoch: int, sender: int, unit: int) -> int:
        return epoch << 16 | (GRADIENTS if self.exchange else 0) | sender << 8 | unit

    def place(self, *key: str | int) -> int:
        """("rows", at, row), ("arrived", at, tile, source), and so on. Both exchanges share the results."""
        exchange = "" if key[0] == "results" else self.exchange
        return self.places.setdefault((f"{exchange}{key[0]}", *key[1:]), len(self.places))

    def message(self, message: Message) -> int:
        self.messages.append(message)
        return 1 << len(self.messages) - 1

    def base(self, at: int, epoch: int) -> int:
        """Where the rows of that pass begin: in the first gap that is long enough, when it comes."""
        if self.exchange or self.config.broken == "rows in one place":
            return 0
        taken: dict[int, tuple[int, int]] = {}
        for kind, number in self.config.passes():
            if kind == "B":
                taken.pop(number, None)
                continue
            begin, length = 0, len(self.config.received(number, at))
            for first, last in sorted(taken.values()):
                if first - begin >= length:
                    break
                begin = max(begin, last)
            if number == epoch:
                return begin
            taken[number] = begin, begin + length
        raise AssertionError(f"no pass {epoch}")

    def bank(self, epoch: int) -> int:
        """Which of two places the counts have."""
        return 0 if self.config.broken == "counts in one place" else epoch % 2

    def word(self, epoch: int) -> int:
        return (1 if self.config.broken == "flag without epoch" else epoch) << LOW

    def launches(self, rank: int) -> list[list[list[Step]]]:
        launches: list[list[list[Step]]] = []
        backwards = 0
        for kind, epoch in self.config.passes():
            if kind == "F":
                counts, forward = self._counts(rank, epoch, len(launches)), self._forward(rank, epoch)
                if self.config.broken == "two streams" and launches:
                    launches[-1] += counts + forward
                elif self.config.broken == "counts ahead" and launches:
                    launches.insert(-1, counts)
                    self._later(rank, len(launches) - 2)
                    launches.append(forward)
                else:
                    launches += [counts, forward]
                self._keep(self._results(rank, epoch), rank, launch=len(launches) - 1)
                # Without a backward in the stream: needed for ever.
                self._keep(self._rows(rank, epoch), rank, launch=1 << LOW)
            else:
                late = self.config.broken == "release before the backward"
                backward, release = self._backward(rank, epoch), []
                backwards += 1
                if self.config.gradients:
                    # Passes of the second exchange are counted in the order of the backwards.
                    self.exchange = "gradient "
                    release = self._release(rank, backwards)
                    backward += self._forward(rank, backwards)
                    rows = self._rows(rank, backwards) + self._results(rank, backwards)
                    self._keep(rows, rank, launch=len(launches) + late)
                    self.exchange = ""
                self._keep(self._rows(rank, epoch), rank, launch=len(launches) + late)
                if late:
                    launches += [release, backward]
                elif self.config.broken == "release within the backward":
                    launches += [backward + release]
                else:
                    launches += [backward, release] if release else [backward]
        return launches

    def _later(self, rank: int, from_launch: int) -> None:
        """A launch has been put in before this one: what is needed until then or later, is needed later."""
        for readers in self.needed_until.values():
            for value, (who, launch) in readers.items():
                if who == rank and from_launch <= launch < 1 << LOW:
                    readers[value] = who, launch + 1

    def _keep(self, reads: list[tuple[int, int]], rank: int, launch: int) -> None:
        """They are needed until that launch of the rank is over."""
        for place, value in reads:
            self.needed_until.setdefault(place, {})[value] = rank, launch

    def _rows(self, rank: int, epoch: int, peers: range | None = None) -> list[tuple[int, int]]:
        """What a backward reads: rows that came from the peers."""
        peers = peers or range(self.config.ranks)
        return [
            (self.place("rows", rank, self.base(rank, epoch) + row), self.tag(epoch, source, unit))
            for row, (source, unit) in enumerate(self.config.received(epoch, rank))
            if source in peers
        ]

    def _results(self, rank: int, epoch: int) -> list[tuple[int, int]]:
        """What the reduction reads, as soon as all of it has been returned."""
        return [
            (self.place("results", rank, row), self.tag(epoch, owner, unit))
            for row, (owner, unit) in enumerate(self.config.sent(epoch, rank))
        ]

    def _credit(self, task: Task, rank: int, epoch: int, peer: int) -> None:
        """Wait until the peer has released the rows of the backward before this one."""
        broken = self.config.broken
        credit = max(0, epoch - (2 if broken == "credit too late" else 1))
        if self.exchange and broken != "no wait for release":
            place = self.place("released", rank, peer)
            task.wait([(place, credit << LOW)], f"released[{peer}] >= {credit}")

    def _counts(self, rank: int, epoch: int, launch: int) -> list[list[Step]]:
        """The launch before the forward's own: one task puts counts to all peers, then waits for theirs."""
        config, bank, task = self.config, self.bank(epoch), Task(self)
        peers = [(rank + step) % config.ranks for step in range(1, config.ranks)]
        for peer in peers:
            task.put(("counts", peer, bank, rank), self.tag(epoch, rank, 0))
            task.signal(("counted", peer, bank, rank), self.word(epoch))
        if config.broken != "counts not waited for":
            words = [(self.place("counted", rank, bank, peer), self.word(epoch)) for peer in peers]
            task.wait(words, f"counted[{bank}] >= {epoch}")
        else:
            task.steps.append((PAUSE, None, "goes on"))
        reads = [(self.place("counts", rank, bank, peer), self.tag(epoch, peer, 0)) for peer in peers]
        self._keep(reads, rank, launch)
        task.read(reads, f"counts[{bank}]")
        return [task.steps]

    def _forward(self, rank: int, epoch: int) -> list[list[Step]]:
        """One launch in the order of schedule.py: puts by tile of where they go, tiles, the reduction."""
        config = self.config
        peers = [(rank + step) % config.ranks for step in range(1, config.ranks + 1)]
        arrivals = {peer: config.arrivals(epoch, peer) for peer in peers}
        tasks = [
            self._send(rank, epoch, peer, tile)
            for tile in range(max(map(len, arrivals.values())))
            for peer in peers
            if any(source == rank for source, _ in (arrivals[peer] + [[]] * (tile + 1))[tile])
        ]
        tasks += [self._tile(rank, epoch, tile, units) for tile, units in enumerate(arrivals[rank])]
        return [*tasks, self._combine(rank, epoch)]

    def _send(self, rank: int, epoch: int, peer: int, tile: int) -> list[Step]:
        """PUT of the units that lie in one tile of the peer."""
        config, base, task = self.config, self.base(peer, epoch), Task(self)
        if config.broken == "offsets of the last epoch":
            base += sum(
                config.filled(epoch - 1, source, peer) - config.filled(epoch, source, peer)
                for source in range(rank)
            )
        self._credit(task, rank, epoch, peer)
        for i, (source, unit) in enumerate(config.arrivals(epoch, peer)[tile]):
            if source == rank:
                task.put(("rows", peer, base + tile * config.per_tile + i), self.tag(epoch, rank, unit))
        task.signal(("arrived", peer, tile, rank), self.word(epoch))
        return task.steps

    def _tile(self, rank: int, epoch: int, tile: int, units: list[tuple[int, int]]) -> list[Step]:
        """TILE_IN and TILE_OUT of a tile; it signals all its sources."""
        config, task = self.config, Task(self)
        if config.broken != "results before arrival":
            self._wait_and_read(task, rank, epoch, tile, units)
        for source, unit in units:
            row = config.sent(epoch, source).index((rank, unit))
            task.put(("results", source, row), self.tag(epoch, rank, unit))
        for source in dict.fromkeys(source for source, _ in units):
            key = "returned", source, config.chunk(epoch, source, rank, tile)
            task.signal(key, self.word(epoch))
        if config.broken == "results before arrival":
            self._wait_and_read(task, rank, epoch, tile, units)
        return task.steps

    def _wait_and_read(self, task: Task, rank: int, epoch: int, tile: int, units: list) -> None:
        config, base, word = self.config, self.base(rank, epoch), self.word(epoch)
        sources = list(dict.fromkeys(source for source, _ in units))
        if config.broken == "waits for one source only":
            sources = sources[:1]
        words = [(self.place("arrived", rank, tile, source), word) for source in sources]
        task.wait(words, f"arrived[{tile}] >= {word >> LOW} of all its sources")
        first = base + tile * config.per_tile
        reads = [
            (self.place("rows", rank, first + i), self.tag(epoch, source, unit))
            for i, (source, unit) in enumerate(units)
        ]
        task.read(reads, f"tile {tile} of rows from {base} on")

    def _combine(self, rank: int, epoch: int) -> list[Step]:
        """The sums of all tokens."""
        config, task, word = self.config, Task(self), self.word(epoch)
        conditions = [
            (self.place("returned", rank, config.chunk(epoch, rank, owner, tile)), word)
            for owner in range(config.ranks)
            for tile, units in enumerate(config.arrivals(epoch, owner))
            if any(source == rank for source, _ in units)
        ]
        task.wait(conditions, f"all that it expects in returned >= {word >> LOW}")
        task.read(self._results(rank, epoch), "results")
        return task.steps

    def _backward(self, rank: int, epoch: int) -> list[list[Step]]:
        """One task for each peer reads what came from it."""
        tasks = []
        for peer in range(self.config.ranks):
            task = Task(self)
            task.steps.append((PAUSE, None, f"backward of epoch {epoch}"))
            task.read(self._rows(rank, epoch, range(peer, peer + 1)), f"rows of PE {peer} again")
            tasks.append(task.steps)
        return tasks

    def _release(self, rank: int, epoch: int) -> list[list[Step]]:
        tasks = []
        for peer in range(self.config.ranks):
            task = Task(self)
            key = "released", peer, rank
            # Of the releases that a PE sends into one word the later comes behind the earlier (stream order).
            task.covered |= self.earlier.get((self.exchange, key), 0)
            self.earlier[self.exchange, key] = task.signal(key, epoch << LOW)
            tasks.append(task.steps)
        return tasks
