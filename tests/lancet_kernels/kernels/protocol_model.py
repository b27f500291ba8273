"""Can the signals of an exchange deadlock, let a PE read too early, or overwrite too early? A model to ask.

What every PE does in a stream such as "F1 F2 B2 B1" (forward and backward passes of one layer, by epoch),
written in the steps of `weak_memory.py`. What a step stands for in the kernels:

    model                kernels
    wait released        device.wait in overlap_tasks.put_chunk: the peer is through with epoch e - B
    put rows             device.put_rows in put_chunk
    put results          the stores of forward_tile and dgrad_tile (TILE_OUT) to the peer's results
    fence                tl.debug_barrier of device.fence and device.quiet: joins the warps of a program
    signal               tl.atomic_xchg(sem="release", scope="sys") of device.put_signal
    wait arrived, count  device.wait in overlap_tasks.wait_rows: the word of chunk 0, then that of the chunk
    read rows            the loads of forward_tile and dgrad_tile (TILE_IN) after wait_rows
    count itself         tl.atomic_add(sem="acq_rel") on done_ptr in overlap_tasks.return_tile
    wait returned        device.wait_all in overlap_tasks.reduce_block; "read results" is what follows it
    backward             whatever reads rows and results of the use later, wherever it runs (dX, dW, gate)
    release              exchange.release_kernel, in stream order behind the last of these
    the stream           what the host launches; Exchange.begin refuses some orders (`admits`)

A release covers the stores of its own warp and, after a fence, of all warps of its program, of this task;
through the counter also those of the chunk's other tiles. That it covers earlier tasks too is not used.

The content of a place is a tag: epoch, sender, chunk. Every reading must find exactly its own epoch's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.lancet_kernels.kernels.weak_memory import (
    COUNT,
    FENCE,
    LAST,
    LOW,
    PAUSE,
    READ,
    RESET,
    SEND,
    SIGNAL,
    WAIT,
    Message,
    Step,
    System,
)

Key = tuple[str | int, ...]

# What can be left out or done wrong. Each is one line of the real code away.
BROKEN = {
    "no fence": "the signal is sent by one warp before the others have stored",
    "relaxed signal": "the signal may overtake the stores before it",
    "relaxed counter": "the tiles of a chunk count themselves without publishing what they stored",
    "one bank": "every epoch uses the same bank, with the credit of two",
    "one released word": "released is one word for a peer, not one for each bank",
    "flag reset": "a PE zeroes the flags of a bank before it uses the bank again",
    "flag without epoch": "a flag says that rows came, not of which epoch",
    "no wait for release": "rows are put without asking whether the bank is free",
    "credit too late": "rows wait for the release of epoch e - 2B, not e - B",
    "release before the backward": "the bank is released before its last reader has run",
    "release within the backward": "by a task of the same launch, while another program still reads",
    "empty is not signalled": "nothing is sent where there are no rows, so the count does not come",
    "waits for chunk 0 only": "a later chunk is read when the first has come",
    "results before arrival": "results are returned before the rows of that epoch were seen",
}


@dataclass(frozen=True)
class Config:
    """One system to explore.

    Attributes:
        stream: passes of the layer on every PE, or one string for each PE.
        chunks: of rows from a source to a peer. warps: parts of a chunk, each stored by another warp.
        tiles: parts of a chunk of results, each made by another task. programs: resident on each PE.
        gradients: a backward sends gradients through a second exchange, as moe_backward does; else it only
            reads what the forward left, and stands for any later reader.
        sparse: which chunks have rows depends on epoch, source and peer; else all have.
        landing: of stores and signals; exact: waits for equality (weak_memory).
        broken: a key of BROKEN, or "" for the protocol as it is.
    """

    stream: str | tuple[str, ...]
    ranks: int = 2
    chunks: int = 1
    warps: int = 1
    tiles: int = 1
    banks: int = 2
    programs: int = 1
    gradients: bool = False
    sparse: bool = False
    landing: str = SIGNAL
    exact: bool = False
    broken: str = ""

    def passes(self, rank: int) -> list[tuple[str, int]]:
        stream = self.stream if isinstance(self.stream, str) else self.stream[rank]
        return [(launch[0], int(launch[1:])) for launch in stream.split()]

    def filled(self, epoch: int, source: int, peer: int) -> int:
        """How many chunks have rows; the first ones."""
        return (epoch + source + 2 * peer) % (self.chunks + 1) if self.sparse else self.chunks


def admits(stream: str, banks: int) -> bool:
    """Does the host let this order of passes through? A bank must be released before its next forward."""
    taken = set()
    for launch in stream.split():
        bank = int(launch[1:]) % banks
        if launch[0] == "F" and bank in taken:
            return False
        (taken.add if launch[0] == "F" else taken.discard)(bank)
    return True


def build(config: Config) -> System:
    """The system of all PEs."""
    script = Script(config)
    launches = [script.launches(rank) for rank in range(config.ranks)]
    names = [f"{name}{list(rest)}" for name, _, *rest in script.places]
    return System(
        launches, script.messages, names, script.needed_until, show,
        programs=config.programs, landing=config.landing, exact=config.exact,
    )  # fmt: skip


def tag(epoch: int, sender: int, chunk: int) -> int:
    return epoch << 16 | sender << 8 | chunk


def show(value: int) -> str:
    return f"(epoch {value >> 16}, of PE {value >> 8 & 255}, chunk {value & 255})" if value else "nothing"


class Task:
    """Writes the steps of one task, and knows which stores a release at this point covers."""

    def __init__(self, script: Script) -> None:
        self.script, self.broken = script, script.config.broken
        self.steps: list[Step] = []
        self.own_warp = self.other_warps = self.covered = 0

    def wait(self, conditions: list[tuple[int, int]], text: str) -> None:
        self.steps.append((WAIT, tuple(conditions), f"waits for {text}"))

    def read(self, reads: list[tuple[int, int]], text: str) -> None:
        self.steps.append((READ, tuple(reads), f"reads {text}"))

    def put(self, key: Key, value: int, text: str) -> None:
        """Each warp stores its part; the first is the one that signals later."""
        text = f"{show(value)} in {text}"
        first, *others = (
            self.script.message(Message(place, value, f"{text}, by warp {warp}"))
            for warp, place in enumerate(self.script.whole(key))
        )
        self.own_warp |= first
        self.other_warps |= sum(others)
        self.covered |= first
        self.steps.append((SEND, first | sum(others), f"puts {text}"))

    def fence(self) -> None:
        if self.broken != "no fence":
            self.covered |= self.other_warps
            self.steps.append((FENCE, None, "fences"))

    def signal(self, key: Key, word: int) -> Message:
        covers = 0 if self.broken == "relaxed signal" else self.covered
        name, peer, *index = key
        text = f"PE {peer}'s {self.script.exchange}{name}{index} := {word >> LOW}"
        message = Message(self.script.place(*key), word, text, True, covers)
        self.steps.append((SEND, self.script.message(message), f"signals {text}"))
        return message


class Script:
    """Writes the launches of every PE."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.exchange = ""
        self.places: dict[Key, int] = {}
        self.messages: list[Message] = []
        self.needed_until: dict[int, dict[int, tuple[int, int]]] = {}

    def place(self, *key: str | int) -> int:
        """("rows", at, bank, source, chunk, warp), ("arrived", at, bank, source, chunk), and so on."""
        return self.places.setdefault((f"{self.exchange}{key[0]}", *key[1:]), len(self.places))

    def whole(self, key: Key) -> list[int]:
        """The places of all warps' parts."""
        return [self.place(*key, warp) for warp in range(self.config.warps)]

    def message(self, message: Message) -> int:
        self.messages.append(message)
        return 1 << len(self.messages) - 1

    def bank(self, epoch: int) -> int:
        return 0 if self.config.broken == "one bank" else epoch % self.config.banks

    def word(self, epoch: int, count: int = 0) -> int:
        return (1 if self.config.broken == "flag without epoch" else epoch) << LOW | count

    def released(self, at: int, of: int, bank: int) -> Key:
        return "released", at, 0 if self.config.broken == "one released word" else bank, of

    def launches(self, rank: int) -> list[list[list[Step]]]:
        launches: list[list[list[Step]]] = []
        backwards = 0
        for kind, epoch in self.config.passes(rank):
            if kind == "F":
                launches.append(self._forward(rank, epoch))
                # Without a backward in the stream: needed for ever.
                self._keep(rank, epoch, launch=1 << LOW)
            else:
                backward, release = self._backward(rank, epoch), self._release(rank, epoch)
                backwards += 1
                if self.config.gradients:
                    # Passes of the second exchange are counted in the order of the backwards.
                    self.exchange = "gradient "
                    backward += self._forward(rank, backwards)
                    self._keep(rank, backwards, launch=len(launches))
                    release = self._release(rank, backwards) + release
                    self.exchange = ""
                self._keep(
                    rank, epoch, launch=len(launches) + (self.config.broken == "release before the backward")
                )
                if self.config.broken == "release before the backward":
                    launches += [release, backward]
                elif self.config.broken == "release within the backward":
                    launches += [backward + release]
                else:
                    launches += [backward, release]
        return launches

    def _keep(self, rank: int, epoch: int, launch: int) -> None:
        for place, value in self._kept(rank, epoch):
            self.needed_until.setdefault(place, {})[value] = rank, launch

    def _kept(self, rank: int, epoch: int, peers: range | None = None) -> list[tuple[int, int]]:
        """What a backward reads: rows that came from the peers, and results that they returned."""
        bank, kept = self.bank(epoch), []
        for peer in peers or range(self.config.ranks):
            for chunk in range(self.config.filled(epoch, peer, rank)):
                key = "rows", rank, bank, peer, chunk
                kept += [(place, tag(epoch, peer, chunk)) for place in self.whole(key)]
        return kept + self._results(rank, epoch, peers or range(self.config.ranks))

    def _results(self, rank: int, epoch: int, owners: range) -> list[tuple[int, int]]:
        return [
            (place, tag(epoch, owner, chunk))
            for owner in owners
            for chunk in range(self.config.filled(epoch, rank, owner))
            for tile in range(self.config.tiles)
            for place in self.whole(("results", rank, self.bank(epoch), owner, chunk, tile))
        ]

    def _forward(self, rank: int, epoch: int) -> list[list[Step]]:
        """One launch in the order of tasks.py: puts, tiles source by source, the reduction."""
        config = self.config
        peers = [(rank + step) % config.ranks for step in range(1, config.ranks + 1)]
        tasks = [self._send(rank, epoch, peer) for peer in peers]
        for source in ((rank - step) % config.ranks for step in range(config.ranks)):
            for chunk in range(config.chunks):
                tasks += self._tiles(rank, epoch, source, chunk)
        tasks.append(self._combine(rank, epoch))
        if config.broken == "flag reset" and epoch > config.banks:
            bank = self.bank(epoch)
            each = [(source, chunk) for source in range(config.ranks) for chunk in range(config.chunks)]
            flags = tuple(self.place("arrived", rank, bank, *one) for one in each)
            text = f"zeroes its arrived[{bank}]"
            tasks.insert(0, [(PAUSE, None, f"begins epoch {epoch}"), (RESET, flags, text)])
        return tasks

    def _send(self, rank: int, epoch: int, peer: int) -> list[Step]:
        """PUT of all chunks for one peer."""
        config, bank = self.config, self.bank(epoch)
        task = Task(self)
        credit = epoch - config.banks * (2 if config.broken == "credit too late" else 1)
        if config.broken != "no wait for release":
            place = self.place(*self.released(rank, peer, bank))
            task.wait([(place, max(0, credit) << LOW)], f"released[{bank}, {peer}] >= {max(0, credit)}")
        filled = config.filled(epoch, rank, peer)
        for chunk in range(max(filled, config.broken != "empty is not signalled")):
            if chunk < filled:
                key = "rows", peer, bank, rank, chunk
                task.put(key, tag(epoch, rank, chunk), f"PE {peer}'s rows[{bank}, {rank}, {chunk}]")
                task.fence()
            task.signal(("arrived", peer, bank, rank, chunk), self.word(epoch, filled))
        return task.steps

    def _tiles(self, rank: int, epoch: int, source: int, chunk: int) -> list[list[Step]]:
        """TILE_IN and TILE_OUT of one chunk, one task for each column tile; the last one signals."""
        tasks = [Task(self) for _ in range(self.config.tiles)]
        early = self.config.broken == "results before arrival"
        if early and chunk >= self.config.filled(epoch, source, rank):
            return []
        bank, signals = self.bank(epoch), []
        value, returned = tag(epoch, rank, chunk), ("returned", source, bank, rank, chunk)
        for tile, task in enumerate(tasks):
            if not early:
                self._wait_and_read(task, rank, epoch, source, chunk)
            index = f"{bank}, {rank}, {chunk}, {tile}"
            task.put(("results", source, bank, rank, chunk, tile), value, f"PE {source}'s results[{index}]")
            task.fence()
            if len(tasks) > 1:
                # The counters of a use are fresh memory.
                counter = self.place("done", rank, epoch, source, chunk)
                text = f"counts itself in done[{source}, {chunk}]"
                task.steps.append((LAST, (counter, len(tasks)), text))
            signals.append(task.signal(returned, self.word(epoch)))
            if early:
                self._wait_and_read(task, rank, epoch, source, chunk)
        if self.config.broken != "relaxed counter":
            covers = 0
            for signal in signals:
                covers |= signal.covers
            for signal in signals:
                signal.covers = covers
        return [task.steps for task in tasks]

    def _wait_and_read(self, task: Task, rank: int, epoch: int, source: int, chunk: int) -> None:
        bank, word = self.bank(epoch), self.word(epoch)
        first = self.place("arrived", rank, bank, source, 0)
        task.wait([(first, word)], f"arrived[{bank}, {source}, 0] >= {word >> LOW}")
        text = f"finds chunk {chunk} of PE {source} beyond the count"
        task.steps.append((COUNT, (first, chunk), text))
        if chunk > 0 and self.config.broken != "waits for chunk 0 only":
            place = self.place("arrived", rank, bank, source, chunk)
            task.wait([(place, word)], f"arrived[{bank}, {source}, {chunk}] >= {word >> LOW}")
        value = tag(epoch, source, chunk)
        places = self.whole(("rows", rank, bank, source, chunk))
        task.read([(place, value) for place in places], f"rows[{bank}, {source}, {chunk}]")

    def _combine(self, rank: int, epoch: int) -> list[Step]:
        """REDUCE of all tokens."""
        task, bank, word = Task(self), self.bank(epoch), self.word(epoch)
        conditions = [
            (self.place("returned", rank, bank, owner, chunk), word)
            for owner in range(self.config.ranks)
            for chunk in range(self.config.filled(epoch, rank, owner))
        ]
        task.wait(conditions, f"all that it expects in returned[{bank}] >= {word >> LOW}")
        task.read(self._results(rank, epoch, range(self.config.ranks)), f"results[{bank}]")
        return task.steps

    def _backward(self, rank: int, epoch: int) -> list[list[Step]]:
        """One task for each peer reads what came from it."""
        tasks = []
        for peer in range(self.config.ranks):
            task = Task(self)
            task.steps.append((PAUSE, None, f"backward of epoch {epoch}"))
            text = f"rows[{self.bank(epoch)}, {peer}] and results[{self.bank(epoch)}, {peer}] again"
            task.read(self._kept(rank, epoch, range(peer, peer + 1)), text)
            tasks.append(task.steps)
        return tasks

    def _release(self, rank: int, epoch: int) -> list[list[Step]]:
        tasks = []
        for peer in range(self.config.ranks):
            task = Task(self)
            task.signal(self.released(peer, rank, self.bank(epoch)), epoch << LOW)
            tasks.append(task.steps)
        return tasks
