"""Can the signals of an exchange deadlock, let a PE read too early, or overwrite too early? A model to ask.

What every PE does in a stream such as "F1 F2 B2 B1" (forward and backward passes of one layer, by epoch),
written in the steps of `weak_memory.py`. What a step stands for in the kernels:

    model                kernels
    wait released        device.wait in exchange_counts_kernel and put_chunk: the peer is through with e - B
    put counts           device.put_values in schedule.exchange_counts_kernel; "signal counted" follows
    wait counted         device.wait_all there; "read counts" is what _offsets loads
    put rows             device.put_rows and put_words in overlap_tasks.put_chunk, to places that follow from
                         the counts
    put results          the stores of gemm_tile.store_to_rows (TILE_OUT) to the results of the sources, and
                         of overlap_tasks.return_dots beside them
    fence                tl.debug_barrier of device.fence and device.quiet: joins the warps of a program
    signal               tl.atomic_xchg(sem="release", scope="sys") of device.put_signal
    wait arrived         device.wait_all in overlap_tasks.wait_rows: the words of all sources of the tile
    read rows            the loads of forward_tile and dgrad_tile (TILE_IN) after wait_rows
    put origins          device.put_words in put_chunk; with dedup it puts the rows of leaders only
    copies               overlap_tasks.wait_leaders: wait arrived, read origins, wait for the leaders' words;
                         fan_tile copies, and finish_fan is the signal "fanned"
    wait fanned          device.wait in overlap_tasks.wait_fanned (TILE_IN), instead of wait arrived
    put staged results   with dedup, of a token with several units here: to stage, which all passes share
    sums                 overlap_tasks.wait_done: waits for the counter of the tile and, from origin to
                         origin, for those of the tiles of its tokens' other units; _merge_rows puts, and
                         signal_sources is the signal "returned"
    count itself         tl.atomic_add(sem="acq_rel") on done_ptr in overlap_tasks.return_tile
    wait returned        device.wait_all in overlap_tasks.reduce_block; "read results" is what follows it
    backward             whatever reads rows of the use later, wherever it runs (dW)
    put x                with `tokens`, in a backward: put_rows of x beside those of dy in put_chunk (SEND_X)
    wait ready           device.wait in overlap_tasks.wait_ready (WGRAD); "read x" is what dw1's tiles load
    release              exchange.release_kernel, in stream order behind the last of these
    the stream           what the host launches; Exchange.begin refuses some orders (`admits`)

A release covers the stores of its own warp and, after a fence, of all warps of its program, of this task;
through the counter also those of the tile's other columns. That it covers earlier tasks too is used for one
thing only: a release comes behind the release before it in the same word.

Rows come in units, `units` of each source at most, of which `per_tile` make a tile: received units lie one
behind the other, source after source, so that a tile may hold units of several sources, and where a unit
lies differs from epoch to epoch. The content of a place is a tag: exchange, epoch, sender, unit. Every
reading must find exactly its own. Both exchanges have their results in one place, without banks
(`ResultBuffers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tests.lancet_kernels.kernels.weak_memory import (
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
    "relaxed counter": "the columns of a tile count themselves without publishing what they stored",
    "one bank": "every epoch uses the same bank, with the credit of two",
    "one released word": "released is one word for a peer, not one for each bank",
    "flag reset": "a PE zeroes the flags of a bank before it uses the bank again",
    "flag without epoch": "a flag says that rows came, not of which epoch",
    "no wait for release": "rows are put without asking whether the bank is free",
    "credit too late": "rows wait for the release of epoch e - 2B, not e - B",
    "release before the backward": "the bank is released before its last reader has run",
    "release within the backward": "by a task of the same launch, while another program still reads",
    "waits for one source only": "a tile with rows of two sources is read when the first one's have come",
    "results before arrival": "results are returned before the rows of that epoch were seen",
    "counts not waited for": "offsets are made from counts that may be those of an earlier epoch",
    "offsets of the last epoch": "rows are put where the counts of the epoch before would have them",
    "counter without epoch": "the sources of a tile add up in one word that nobody sets back",
    "counts without release": "counts are put while the peer may still read those of the bank's last use",
    "copies without the leader's word": "rows are copied when the words of their own tile have come",
    "origins before their word": "origins are read before the words of their tile have come",
    "leader of another source": "a row's origin is a row of another PE, whose word nobody waits for",
    "copy of a copy": "a row's origin is itself a copy, which no word of its source says to be there",
    "copies without fence": "the word of the copies is sent by one warp before the others have stored",
    "relaxed copies": "the word of the copies may overtake them",
    "copied word without epoch": "it stays from use to use of a bank, and says only that rows were copied",
    "tile without its copies": "a tile is read when the words of its sources have come",
    "sums without their tile": "staged results are added up before their tile is done",
    "sums without other tiles": "results are added up before the tiles of a token's other rows are done",
    "origins before their tile is done": "the way leads on through an origin that may be of another epoch",
    "sums signalled early": "the sources are told before the sums are stored",
    "sums without fence": "the sources are told by one warp before the others have stored the sums",
    "done word without epoch": "it stays from use to use, and says only that a tile was done",
    "release before the sums": "the bank is released before its origins have shown what to add up",
    "release before the copies": "the bank is released before its rows have been copied",
    "two streams": "a pass is launched beside another one, which still reads the results that both have",
    "x behind the signal": "rows of x are put when those of dy have been signalled",
    "x in one bank": "rows of x lie in the same place in every epoch",
    "x is not copied": "of duplicates sent once only the rows of dy are copied from their leaders",
    "release within the pass": "of tokens: by a task of the launch, while another program still reads",
}


@dataclass(frozen=True)
class Config:
    """One system to explore.

    Attributes:
        stream: passes of the layer on every PE, or one string for each PE.
        units: of rows from a source to a peer, at most. per_tile: units of a tile.
        warps: parts of a unit, each stored by another warp.
        tiles: columns of a tile of results, each made by another task. programs: resident on each PE.
        gradients: a backward sends gradients through a second exchange, as moe_backward does; else it only
            reads what the forward left, and stands for any later reader. Counts are not exchanged for it.
        gradient_banks: of that exchange; 0: as many as `banks`. Fewer where layers share it.
        tokens: a pass keeps none of its rows; forwards and backwards are epochs of one exchange, and
            backwards send rows of x beside those of dy.
        dedup: of the units from a source to a peer only the first is sent; the others are copied from it, and
            only the last of their results comes back, as the sum of all.
        sparse: how many units there are depends on epoch, source and peer; else all are there.
        landing: of stores and signals; exact: waits for equality (weak_memory).
        broken: a key of BROKEN, or "" for the protocol as it is.
    """

    stream: str | tuple[str, ...]
    ranks: int = 2
    units: int = 1
    per_tile: int = 2
    warps: int = 1
    tiles: int = 1
    banks: int = 2
    programs: int = 1
    gradients: bool = False
    gradient_banks: int = 0
    tokens: bool = False
    dedup: bool = False
    sparse: bool = False
    landing: str = SIGNAL
    exact: bool = False
    broken: str = ""

    def passes(self, rank: int) -> list[tuple[str, int]]:
        stream = self.stream if isinstance(self.stream, str) else self.stream[rank]
        return [(launch[0], int(launch[1:])) for launch in stream.split()]

    def filled(self, epoch: int, source: int, peer: int) -> int:
        """How many units source sends to peer: the counts."""
        return (epoch + source + 2 * peer) % (self.units + 1) if self.sparse else self.units

    def received(self, epoch: int, peer: int) -> list[tuple[int, int]]:
        """(source, unit) of every unit that a peer receives, in the order in which they lie."""
        sources = range(self.ranks)
        return [(source, unit) for source in sources for unit in range(self.filled(epoch, source, peer))]

    def leader(self, unit: int) -> int:
        """Which unit of the same source has the same content, and is sent."""
        if self.broken == "copy of a copy":
            return max(0, unit - 1)
        return 0 if self.dedup else unit

    def comes_back(self, epoch: int, source: int, owner: int, unit: int) -> bool:
        """Is there a result of this unit, or of all units of the source, at its place?"""
        return not self.dedup or unit == self.filled(epoch, source, owner) - 1

    def staged(self, epoch: int, source: int, owner: int) -> bool:
        """Do the owner's results of this source go through stage?"""
        return self.dedup and self.filled(epoch, source, owner) > 1

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


# In a tag: of the second exchange.
GRADIENTS = 1 << 15


def show(value: int) -> str:
    of = "gradients of " if value & GRADIENTS else ""
    return f"({of}epoch {value >> 16}, of PE {value >> 8 & 127}, unit {value & 255})" if value else "nothing"


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

    def fence(self, broken: str = "no fence") -> None:
        if self.broken != broken:
            self.covered |= self.other_warps
            self.steps.append((FENCE, None, "fences"))

    def signal(self, key: Key, word: int, add: bool = False) -> Message:
        relaxed = {"relaxed signal", "relaxed copies" if key[0] == "fanned" else ""} - {""}
        covers = 0 if self.broken in relaxed else self.covered
        name, peer, *index = key
        text = f"PE {peer}'s {self.script.exchange}{name}{index} {'+' if add else ':'}= {word >> LOW}"
        message = Message(self.script.place(*key), word, text, True, covers, add)
        self.steps.append((SEND, self.script.message(message), f"signals {text}"))
        return message


class Script:
    """Writes the launches of every PE."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.exchange = ""
        # Does the pass whose steps are being written send x beside its rows?
        self.sends_x = False
        self.places: dict[Key, int] = {}
        self.messages: list[Message] = []
        self.earlier: dict[tuple[str, Key], int] = {}
        self.needed_until: dict[int, dict[int, tuple[int, int]]] = {}

    def tag(self, epoch: int, sender: int, unit: int) -> int:
        return epoch << 16 | (GRADIENTS if self.exchange else 0) | sender << 8 | unit

    def place(self, *key: str | int) -> int:
        """("rows", at, bank, row, warp), ("arrived", at, bank, tile, source), and so on.

        ("results", at, row, tile, warp) and ("stage", ..) both exchanges have together.
        """
        if key[0] in ("results", "stage"):
            return self.places.setdefault(key, len(self.places))
        return self.places.setdefault((f"{self.exchange}{key[0]}", *key[1:]), len(self.places))

    def whole(self, key: Key) -> list[int]:
        """The places of all warps' parts."""
        return [self.place(*key, warp) for warp in range(self.config.warps)]

    def message(self, message: Message) -> int:
        self.messages.append(message)
        return 1 << len(self.messages) - 1

    @property
    def banks(self) -> int:
        """Of the exchange whose steps are being written."""
        return (self.exchange and self.config.gradient_banks) or self.config.banks

    def bank(self, epoch: int) -> int:
        return 0 if self.config.broken == "one bank" else epoch % self.banks

    def word(self, epoch: int, count: int = 0) -> int:
        return (1 if self.config.broken == "flag without epoch" else epoch) << LOW | count

    def released(self, at: int, of: int, bank: int) -> Key:
        return "released", at, 0 if self.config.broken == "one released word" else bank, of

    def launches(self, rank: int) -> list[list[list[Step]]]:
        if self.config.tokens:
            return self._launches_of_one_exchange(rank)
        launches: list[list[list[Step]]] = []
        backwards = 0
        for kind, epoch in self.config.passes(rank):
            if kind == "F":
                counts, forward = self._counts(rank, epoch, len(launches)), self._forward(rank, epoch)
                if self.config.broken == "two streams" and launches:
                    launches[-1] += counts + forward
                else:
                    launches += [counts, forward]
                self._keep_results(rank, epoch, launch=len(launches) - 1)
                # Without a backward in the stream: needed for ever.
                self._keep(rank, epoch, launch=1 << LOW)
            else:
                late = self.config.broken == "release before the backward"
                backward, release = self._backward(rank, epoch), self._release(rank, epoch)
                backwards += 1
                if self.config.gradients:
                    # Passes of the second exchange are counted in the order of the backwards.
                    self.exchange = "gradient "
                    early = self.config.broken in ("release before the copies", "release before the sums")
                    own = self._release(rank, backwards)
                    backward += self._forward(rank, backwards, own if early else [])
                    self._keep(rank, backwards, launch=len(launches) + late)
                    self._keep_results(rank, backwards, launch=len(launches) + late)
                    release = ([] if early else own) + release
                    self.exchange = ""
                self._keep(rank, epoch, launch=len(launches) + late)
                if late:
                    launches += [release, backward]
                elif self.config.broken == "release within the backward":
                    launches += [backward + release]
                else:
                    launches += [backward, release]
        return launches

    def _launches_of_one_exchange(self, rank: int) -> list[list[list[Step]]]:
        """Of passes that keep tokens. Whatever pass it is, its bank is released behind its launch."""
        launches: list[list[list[Step]]] = []
        for epoch, (kind, _) in enumerate(self.config.passes(rank), 1):
            self.sends_x = kind == "B"
            if kind == "F":
                launches.append(self._counts(rank, epoch, len(launches)))
            self._keep(rank, epoch, launch=len(launches))
            self._keep_results(rank, epoch, launch=len(launches))
            tasks, release = self._forward(rank, epoch), self._release(rank, epoch)
            early = self.config.broken == "release within the pass"
            launches += [tasks + release] if early else [tasks, release]
        return launches

    def _keep(self, rank: int, epoch: int, launch: int) -> None:
        for place, value in self._kept(rank, epoch) + self._origins(rank, epoch) + self._x_rows(rank, epoch):
            self.needed_until.setdefault(place, {})[value] = rank, launch

    def _keep_results(self, rank: int, epoch: int, launch: int) -> None:
        received = self.config.received(epoch, rank)
        for place, value in self._results(rank, epoch) + self._staged(rank, epoch, received):
            self.needed_until.setdefault(place, {})[value] = rank, launch

    def _kept(self, rank: int, epoch: int, peers: range | None = None) -> list[tuple[int, int]]:
        """What a backward reads: rows that came from the peers."""
        peers = peers or range(self.config.ranks)
        return [
            (place, self.tag(epoch, source, unit))
            for row, (source, unit) in enumerate(self.config.received(epoch, rank))
            for place in self.whole(("rows", rank, self.bank(epoch), row))
            if source in peers
        ]

    def _x(self, at: int, bank: int, row: int) -> Key:
        return "x", at, 0 if self.config.broken == "x in one bank" else bank, row

    def _x_rows(self, rank: int, epoch: int, units: list[tuple[int, int]] | None = None) -> list:
        """The rows of x of these units, or of all received, as they must be; none in a forward."""
        received = self.config.received(epoch, rank)
        return [
            (place, self.tag(epoch, *one))
            for row, one in enumerate(received)
            for place in self.whole(self._x(rank, self.bank(epoch), row))
            if self.sends_x and (units is None or one in units)
        ]

    def _origins(self, rank: int, epoch: int, units: list[tuple[int, int]] | None = None) -> list:
        """The origins of these units, or of all received, as they must be."""
        if not self.config.dedup:
            return []
        received = self.config.received(epoch, rank)
        return [
            (place, self.tag(epoch, source, self.config.leader(unit)))
            for source, unit in received
            for place in self.whole(("origin", rank, self.bank(epoch), received.index((source, unit))))
            if units is None or (source, unit) in units
        ]

    def _results(self, rank: int, epoch: int) -> list[tuple[int, int]]:
        """What the reduction reads, as soon as all of it has been returned."""
        return [
            (place, self.tag(epoch, owner, unit))
            for row, (owner, unit) in enumerate(self.config.sent(epoch, rank))
            if self.config.comes_back(epoch, rank, owner, unit)
            for tile in range(self.config.tiles)
            for place in self.whole(("results", rank, row, tile))
        ]

    def _staged(self, rank: int, epoch: int, units: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What lies in stage of the results of these units."""
        received = self.config.received(epoch, rank)
        return [
            (place, self.tag(epoch, source, unit))
            for source, unit in units
            if self.config.staged(epoch, source, rank)
            for tile in range(self.config.tiles)
            for place in self.whole(("stage", rank, received.index((source, unit)), tile))
        ]

    def _credit(self, task: Task, rank: int, epoch: int, peer: int) -> None:
        """Wait until the peer has released the bank."""
        config, bank = self.config, self.bank(epoch)
        credit = max(0, epoch - self.banks * (2 if config.broken == "credit too late" else 1))
        if config.broken != "no wait for release":
            place = self.place(*self.released(rank, peer, bank))
            task.wait([(place, credit << LOW)], f"released[{bank}, {peer}] >= {credit}")

    def _counts(self, rank: int, epoch: int, launch: int) -> list[list[Step]]:
        """The launch before the forward's own: one task puts counts to all peers, then waits for theirs."""
        config, bank, task = self.config, self.bank(epoch), Task(self)
        peers = [(rank + step) % config.ranks for step in range(1, config.ranks)]
        for peer in peers:
            if config.broken != "counts without release":
                self._credit(task, rank, epoch, peer)
            text = f"PE {peer}'s counts[{bank}, {rank}]"
            task.put(("counts", peer, bank, rank), self.tag(epoch, rank, 0), text)
            task.fence()
            task.signal(("counted", peer, bank, rank), self.word(epoch))
        if config.broken != "counts not waited for":
            words = [(self.place("counted", rank, bank, peer), self.word(epoch)) for peer in peers]
            task.wait(words, f"counted[{bank}] >= {epoch}")
        reads = []
        for peer in peers:
            reads += [(place, self.tag(epoch, peer, 0)) for place in self.whole(("counts", rank, bank, peer))]
        for place, value in reads:
            self.needed_until.setdefault(place, {})[value] = rank, launch
        task.read(reads, f"counts[{bank}]")
        return [task.steps]

    def _forward(self, rank: int, epoch: int, release: list[list[Step]] = ()) -> list[list[Step]]:
        """One launch in the order of schedule.py: puts by tile of where they go, tiles, sums, the reduction.

        release: tasks that come where they must not be, behind the puts or behind the tiles.
        """
        config = self.config
        peers = [(rank + step) % config.ranks for step in range(1, config.ranks + 1)]
        arrivals = {peer: config.arrivals(epoch, peer) for peer in peers}
        tasks = [
            self._send(rank, epoch, peer, tile)
            for tile in range(max(map(len, arrivals.values())))
            for peer in peers
            if any(source == rank for source, _ in (arrivals[peer] + [[]] * (tile + 1))[tile])
        ]
        if config.broken == "release before the copies":
            tasks += release
        if config.dedup:
            # Among the puts, ahead of the tiles.
            tasks += [self._copies(rank, epoch, *one) for one in enumerate(arrivals[rank])]
        for tile, units in enumerate(arrivals[rank]):
            tasks += self._tiles(rank, epoch, tile, units)
        if config.broken == "release before the sums":
            tasks += release
        if self.sends_x:
            tasks.append(self._weight_gradient(rank, epoch, len(arrivals[rank])))
        if config.dedup:
            tasks += [self._sums(rank, epoch, *one) for one in enumerate(arrivals[rank])]
        tasks.append(self._combine(rank, epoch))
        if config.broken == "flag reset" and epoch > self.banks:
            bank = self.bank(epoch)
            tiles = range(-(-config.units * config.ranks // config.per_tile))
            each = [(tile, source) for tile in tiles for source in range(config.ranks)]
            flags = tuple(self.place("arrived", rank, bank, *one) for one in each)
            text = f"zeroes its arrived[{bank}]"
            tasks.insert(0, [(PAUSE, None, f"begins epoch {epoch}"), (RESET, flags, text)])
        return tasks

    def _send(self, rank: int, epoch: int, peer: int, tile: int) -> list[Step]:
        """PUT of the units that lie in one tile of the peer."""
        config, bank, task = self.config, self.bank(epoch), Task(self)
        self._credit(task, rank, epoch, peer)
        shift = 0
        if config.broken == "offsets of the last epoch":
            shift = sum(
                config.filled(epoch - 1, source, peer) - config.filled(epoch, source, peer)
                for source in range(rank)
            )
        x_rows = []
        for i, (source, unit) in enumerate(config.arrivals(epoch, peer)[tile]):
            if source == rank:
                row = tile * config.per_tile + i + shift
                where = f"PE {peer}'s rows[{bank}, {row}]"
                if not config.dedup or unit == 0:
                    task.put(("rows", peer, bank, row), self.tag(epoch, rank, unit), where)
                    if self.sends_x:
                        x_rows.append(
                            (self._x(peer, bank, row), self.tag(epoch, rank, unit), f"x of {where}")
                        )
                if config.dedup:
                    lead = self.tag(epoch, rank, config.leader(unit))
                    task.put(("origin", peer, bank, row), lead, f"the origin of {where}")
        if config.broken != "x behind the signal":
            for each in x_rows:
                task.put(*each)
        task.fence()
        if config.broken == "counter without epoch":
            task.signal(("arrived", peer, bank, tile, 0), 1 << LOW, add=True)
        else:
            task.signal(("arrived", peer, bank, tile, rank), self.word(epoch))
        if config.broken == "x behind the signal":
            for each in x_rows:
                task.put(*each)
        return task.steps

    def _tiles(self, rank: int, epoch: int, tile: int, units: list[tuple[int, int]]) -> list[list[Step]]:
        """TILE_IN and TILE_OUT of a tile, one task for each column; the last one signals all its sources.

        With dedup it says that the tile is done.
        """
        config = self.config
        tasks = [Task(self) for _ in range(config.tiles)]
        signals: dict[int, list[Message]] = {}
        for column, task in enumerate(tasks):
            if config.broken != "results before arrival":
                self._wait_and_read(task, rank, epoch, tile, units)
            for source, unit in units:
                if config.staged(epoch, source, rank):
                    row = config.received(epoch, rank).index((source, unit))
                    text = f"its own stage[{row}, {column}]"
                    task.put(("stage", rank, row, column), self.tag(epoch, source, unit), text)
                else:
                    self._put_result(task, rank, epoch, column, source, unit)
            task.fence()
            if self.sends_x:
                # The counters of a use are fresh memory.
                task.signal(("ready", rank, epoch, tile, column), 1 << LOW)
            if len(tasks) > 1:
                counter = self.place("done", rank, epoch, tile)
                task.steps.append((LAST, (counter, len(tasks)), f"counts itself in done[{tile}]"))
            if config.dedup:
                signals.setdefault(rank, []).append(task.signal(*self._done(rank, epoch, tile)))
            else:
                for source, signal in self._signal_sources(task, rank, epoch, tile, units):
                    signals.setdefault(source, []).append(signal)
            if config.broken == "results before arrival":
                self._wait_and_read(task, rank, epoch, tile, units)
        if config.broken != "relaxed counter":
            for each in signals.values():
                covers = 0
                for signal in each:
                    covers |= signal.covers
                for signal in each:
                    signal.covers = covers
        return [task.steps for task in tasks]

    def _put_result(self, task: Task, rank: int, epoch: int, column: int, source: int, unit: int) -> None:
        row = self.config.sent(epoch, source).index((rank, unit))
        text = f"PE {source}'s results[{row}, {column}]"
        task.put(("results", source, row, column), self.tag(epoch, rank, unit), text)

    def _signal_sources(
        self, task: Task, rank: int, epoch: int, tile: int, units: list[tuple[int, int]]
    ) -> list[tuple[int, Message]]:
        sent = []
        for source in dict.fromkeys(source for source, _ in units):
            key = "returned", source, self.bank(epoch), self.config.chunk(epoch, source, rank, tile)
            sent.append((source, task.signal(key, self.word(epoch))))
        return sent

    def _sums(self, rank: int, epoch: int, tile: int, units: list[tuple[int, int]]) -> list[Step]:
        """MERGE of a tile."""
        config, task = self.config, Task(self)
        received = config.received(epoch, rank)
        lasts = [one for one in units if config.comes_back(epoch, one[0], rank, one[1])]
        lasts = [one for one in lasts if config.staged(epoch, one[0], rank)]
        ways = {one: [(one[0], unit) for unit in range(one[1] - 1, -1, -1)] for one in lasts}
        if config.broken != "sums without their tile":
            self._wait_done(task, rank, epoch, tile)
        task.read(self._origins(rank, epoch, units), f"origins of tile {tile}")
        if config.broken == "sums signalled early":
            self._signal_sources(task, rank, epoch, tile, units)
        for last, way in ways.items():
            for unit in way:
                text = f"the origin of a row before the last of PE {last[0]}"
                if config.broken == "origins before their tile is done":
                    task.read(self._origins(rank, epoch, [unit]), text)
                if config.broken == "sums without other tiles":
                    # The origins are there, nothing else.
                    at = received.index(unit) // config.per_tile
                    self._wait_arrived(task, rank, epoch, at, config.arrivals(epoch, rank)[at])
                else:
                    self._wait_done(task, rank, epoch, received.index(unit) // config.per_tile)
                task.read(self._origins(rank, epoch, [unit]), text)
            task.read(self._staged(rank, epoch, [last, *way]), f"stage of the rows of PE {last[0]}")
            for column in range(config.tiles):
                self._put_result(task, rank, epoch, column, *last)
        task.fence("sums without fence")
        if config.broken != "sums signalled early":
            self._signal_sources(task, rank, epoch, tile, units)
        return task.steps

    def _done(self, rank: int, epoch: int, tile: int) -> tuple[Key, int]:
        """Which word says that all columns of a tile are stored, and its value: fresh memory in each use."""
        at = self.bank(epoch) if self.config.broken == "done word without epoch" else epoch
        return ("all done", rank, at, tile), 1 << LOW

    def _wait_done(self, task: Task, rank: int, epoch: int, tile: int) -> None:
        key, word = self._done(rank, epoch, tile)
        task.wait([(self.place(*key), word)], f"tile {tile} to be done")

    def _copies(self, rank: int, epoch: int, tile: int, units: list[tuple[int, int]]) -> list[Step]:
        """FAN of a tile."""
        config, bank, word, task = self.config, self.bank(epoch), self.word(epoch), Task(self)
        received = config.received(epoch, rank)
        if config.broken != "origins before their word":
            self._wait_arrived(task, rank, epoch, tile, units)
        task.read(self._origins(rank, epoch, units), f"origins of tile {tile} of rows[{bank}]")
        copied = [(source, unit) for source, unit in units if unit]
        words, reads = [], []
        for source, unit in copied:
            lead = source, config.leader(unit)
            if config.broken == "leader of another source":
                lead = next((one for one in received if one[0] != source and not one[1]), lead)
            row = received.index(lead)
            words.append((self.place("arrived", rank, bank, row // config.per_tile, source), word))
            reads += [(place, self.tag(epoch, *lead)) for place in self.whole(("rows", rank, bank, row))]
        # A source that has no rows in the tile of a wrong leader has no word there.
        if config.broken == "leader of another source":
            tiles = config.arrivals(epoch, rank)
            sent = {
                self.place("arrived", rank, bank, number, source)
                for number, in_tile in enumerate(tiles)
                for source, _ in in_tile
            }
            words = [one for one in words if one[0] in sent]
        if words and config.broken != "copies without the leader's word":
            task.wait(words, f"arrived[{bank}] >= {word >> LOW} of the leaders of tile {tile}")
        leaders = [(source, config.leader(unit)) for source, unit in copied]
        reads += self._x_rows(rank, epoch, leaders)
        task.read(reads, f"the leaders of tile {tile} of rows[{bank}]")
        for source, unit in copied:
            row = received.index((source, unit))
            where = f"its own rows[{bank}, {row}]"
            task.put(("rows", rank, bank, row), self.tag(epoch, source, unit), where)
            if self.sends_x and config.broken != "x is not copied":
                task.put(self._x(rank, bank, row), self.tag(epoch, source, unit), f"x of {where}")
        task.fence("copies without fence")
        task.signal(*self._fanned(rank, epoch, tile))
        return task.steps

    def _fanned(self, rank: int, epoch: int, tile: int) -> tuple[Key, int]:
        """Which word says that a tile's rows are copied, and its value: fresh memory in each use."""
        if self.config.broken == "copied word without epoch":
            return ("fanned", rank, self.bank(epoch), tile), 1 << LOW
        return ("fanned", rank, epoch, tile), 1 << LOW

    def _weight_gradient(self, rank: int, epoch: int, tiles: int) -> list[Step]:
        """WGRAD of dw1, over all rows of x."""
        task, each = Task(self), product(range(tiles), range(self.config.tiles))
        words = [self.place("ready", rank, epoch, *one) for one in each]
        task.wait([(place, 1 << LOW) for place in words], "all its tiles to be ready")
        task.read(self._x_rows(rank, epoch), f"x of rows[{self.bank(epoch)}]")
        return task.steps

    def _wait_and_read(self, task: Task, rank: int, epoch: int, tile: int, units: list) -> None:
        config, bank = self.config, self.bank(epoch)
        if config.dedup and config.broken != "tile without its copies":
            key, word = self._fanned(rank, epoch, tile)
            task.wait([(self.place(*key), word)], f"copies in tile {tile}")
        else:
            self._wait_arrived(task, rank, epoch, tile, units)
        reads = []
        for i, (source, unit) in enumerate(units):
            places = self.whole(("rows", rank, bank, tile * config.per_tile + i))
            reads += [(place, self.tag(epoch, source, unit)) for place in places]
        task.read(reads, f"tile {tile} of rows[{bank}]")

    def _wait_arrived(self, task: Task, rank: int, epoch: int, tile: int, units: list) -> None:
        config, bank, word = self.config, self.bank(epoch), self.word(epoch)
        sources = list(dict.fromkeys(source for source, _ in units))
        words = [(self.place("arrived", rank, bank, tile, source), word) for source in sources]
        if config.broken == "waits for one source only":
            words = words[:1]
        elif config.broken == "counter without epoch":
            words = [(self.place("arrived", rank, bank, tile, 0), len(sources) << LOW)]
        task.wait(words, f"arrived[{bank}, {tile}] >= {word >> LOW} of all its sources")

    def _combine(self, rank: int, epoch: int) -> list[Step]:
        """REDUCE of all tokens."""
        config, task, bank, word = self.config, Task(self), self.bank(epoch), self.word(epoch)
        conditions = [
            (self.place("returned", rank, bank, config.chunk(epoch, rank, owner, tile)), word)
            for owner in range(config.ranks)
            for tile, units in enumerate(config.arrivals(epoch, owner))
            if any(source == rank for source, _ in units)
        ]
        task.wait(conditions, f"all that it expects in returned[{bank}] >= {word >> LOW}")
        task.read(self._results(rank, epoch), "results")
        return task.steps

    def _backward(self, rank: int, epoch: int) -> list[list[Step]]:
        """One task for each peer reads what came from it."""
        tasks = []
        for peer in range(self.config.ranks):
            task = Task(self)
            task.steps.append((PAUSE, None, f"backward of epoch {epoch}"))
            text = f"rows[{self.bank(epoch)}, {peer}] again"
            task.read(self._kept(rank, epoch, range(peer, peer + 1)), text)
            tasks.append(task.steps)
        return tasks

    def _release(self, rank: int, epoch: int) -> list[list[Step]]:
        tasks = []
        for peer in range(self.config.ranks):
            task = Task(self)
            key = self.released(peer, rank, self.bank(epoch))
            # Of the releases that a PE sends into one word the later comes behind the earlier (stream order).
            task.covered |= self.earlier.get((self.exchange, key), 0)
            task.signal(key, epoch << LOW)
            self.earlier[self.exchange, key] = 1 << len(self.messages) - 1
            tasks.append(task.steps)
        return tasks
