"""Links to peers: dialled, greeted, kept alive by heartbeats, dialled again when they break, and dropped.

    connect ──► handshake ──► open: ◄── Beat … Beat ──► ──► lost ──► redial … redial ──► open, or given up

A link that breaks is dialled again by the end that dialled it, until that end drops the peer or has failed to reach it
for RELINK_S.

Two ends that have read other weights find a tensor in which they differ: each message names the first sixteenth of a
part that differs, and what is in it, until few tensors are left."""

from __future__ import annotations

from functools import partial

import attrs

from pdinfer.checks import MAX_WAIT_S, typed
from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.identity import DIGITS, FEW_TENSORS, TensorDigests
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.book import REDIAL_S, LinkBook
from pdinfer.kv.channel.peer import Occupied, Peer, Wanted
from pdinfer.kv.channel.wire import Compare, check_key
from pdinfer.kv.layout import WEIGHTS_IDS, KVLayout
from pdinfer.kv.transports.base import Transport
from pdinfer.log import log
from pdinfer.process.silence import LINKS
from pdinfer.types import PeerAddress, PeerKey, peer_key

MAX_COMPARES = 32
"""How many such messages an end reads from a peer: two for each digit of a part's name."""


def is_findable(error: LayoutMismatch, ours: KVLayout, theirs: KVLayout) -> bool:
    """Return whether nothing but weights differs that both ends have read."""
    have_read = all(layout.weights_id and layout.sampled_weights_id for layout in (ours, theirs))
    return have_read and all(name in WEIGHTS_IDS for name, _, _ in error.fields)


def told(tensors: TensorDigests, part: str) -> Compare:
    """Return the message that tells what is in a part: its tensors when they are few, else digests of its parts."""
    few = tensors.of(part)
    return Compare(part, (), tuple(few)) if len(few) <= FEW_TENSORS else Compare(part, tensors.digests(part))


def answer(tensors: TensorDigests, message: Compare) -> Compare:
    """Return what to tell whoever has told this."""
    if not message.digests:
        return told(tensors, message.part)
    pairs = zip(DIGITS, tensors.digests(message.part), message.digests, strict=True)
    return told(tensors, message.part + next((digit for digit, ours, theirs in pairs if ours != theirs), ""))


def found(tensors: TensorDigests, message: Compare) -> tuple[tuple[str, str, str], ...]:
    """Return the tensors that differ as (name, ours, theirs), once both ends have told theirs of a part; none before
    that."""
    ours = {tensor.name: tensor for tensor in tensors.of(message.part)}
    if message.digests or len(ours) > FEW_TENSORS:
        return ()
    theirs = {tensor.name: tensor for tensor in message.tensors}
    return tuple(
        (f"weights.{name}", str(ours.get(name, "absent")), str(theirs.get(name, "absent")))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )


HANDSHAKE_S = 10.0
RELINK_S = 60.0
ANYONE = b"\0"
"""The engine id in what this end asks for when it dials an endpoint and not a peer."""


def check_greeting(peer: Peer, message: wire.Hello | wire.Welcome, us: PeerAddress, layout: KVLayout) -> None:
    """Raise TransferError or LayoutMismatch when the peer is not welcome at `us`."""
    if isinstance(message, wire.Hello) == peer.dialled:
        raise TransferError(f"a {type(message).__name__} frame came from the wrong end of the link")
    if peer.dialled and peer.asked_for is None:
        raise TransferError("a Welcome frame came before this end said who it is")
    if peer_key(message.address) == peer_key(us):
        raise TransferError("the peer says that it is this very end; an engine id is made anew for every end")
    unknown = set(message.required if isinstance(message, wire.Hello) else ()) - wire.FEATURES
    if unknown:
        raise TransferError(f"the peer requires features this end does not have: {', '.join(sorted(unknown))}")
    asked = None if peer.asked_for is None or peer.asked_for.engine_id == ANYONE else peer_key(peer.asked_for)
    if asked is not None and asked != peer_key(message.address):
        raise TransferError(f"{peer.link.endpoint} answers as another engine: the peer asked for was restarted")
    layout.compatible_with(message.layout)


def refusal(message: wire.Reject) -> PDInferError:
    """Return the peer's reason for refusing, from the point of view of this end."""
    error = message.error
    if isinstance(error, LayoutMismatch) and message.fields:
        fields = tuple((name, ours, theirs) for name, theirs, ours in message.fields)
        error = LayoutMismatch.of(fields, said_by="the peer refuses: ")
    return Occupied(str(error), message.refuser) if message.again else error


class Handshake:
    """What one end sends and reads until a link is open."""

    def __init__(self, book: LinkBook, layout: KVLayout, tensors: TensorDigests, key: bytes | None) -> None:
        check_key(key)
        self._book = book
        self._tensors = tensors
        self._layout = attrs.evolve(layout)  # without what a layout keeps of itself once asked: that would travel too
        self._key = key

    def open(self, peer: Peer) -> None:
        """Send this end's first frame, unless it was sent before."""
        version = (wire.MAJOR, wire.MINOR)
        peer.open(wire.encode(wire.Open(version, peer.nonce, self._key is not None)))

    def introduce(self, peer: Peer) -> None:
        """Send who dialled."""
        peer.post(wire.encode(wire.Hello(self._book.us, self._layout)))

    def read(self, peer: Peer, frame: bytes) -> None:
        """Read a frame on a link that is not open. Raises TransferError when it was sent after a refusal."""
        if peer.refusal is not None:
            raise TransferError(f"{peer.link.endpoint} went on after it was refused: {peer.refusal}")
        if not peer.has_session:
            self._meet(peer, wire.decode(frame))
            return
        try:
            verified = peer.verify(frame)
        except TransferError as error:
            self._reject(peer, error)
        else:
            self._greet(peer, wire.decode(verified))

    def _meet(self, peer: Peer, message: wire.Message) -> None:
        """Read the first frame of the other end. From here on frames carry tags, and the end that dialled says who it
        is."""
        if not isinstance(message, wire.Open):
            raise TransferError(f"a link begins with its peer's nonce, not with a {type(message).__name__} frame")
        self.open(peer)
        has_key = self._key is not None
        if message.version[0] != wire.MAJOR:
            reason = f"the peer speaks protocol {message.version[0]}, this end speaks {wire.MAJOR}"
            self._book.refuse(peer, TransferError(reason))
        elif message.keyed != has_key:
            has, lacks = ("this end", "the peer") if has_key else ("the peer", "this end")
            reason = f"{has} has a key and {lacks} has none; give both ends the same one"
            self._book.refuse(peer, TransferError(reason))
        else:
            with self._book.changed:
                peer.begin_session(message.nonce, self._key)
                is_asked = peer.asked_for is not None
            if is_asked:
                self.introduce(peer)

    def _greet(self, peer: Peer, message: wire.Message) -> None:
        """Read a tagged frame on a link that is not open yet. Anything but a handshake closes the link."""
        if isinstance(message, wire.Reject):
            self._book.refuse(peer, refusal(message))
        elif isinstance(message, wire.Hello | wire.Welcome) and peer.difference is None:
            try:
                check_greeting(peer, message, self._book.us, self._layout)
                crowded = self._admit(peer, message)
            except LayoutMismatch as error:
                self._find(peer, error, message.layout)
            except PDInferError as error:
                self._reject(peer, error)
            else:
                peer.flush()
                if crowded is not None:
                    self._book.give_up(crowded, f"{crowded.link.endpoint} had nothing to do here, and others came")
        elif isinstance(message, wire.Compare):
            self._compare(peer, message)
        else:
            raise TransferError(f"a {type(message).__name__} frame came at another time in the handshake")

    def _find(self, peer: Peer, error: LayoutMismatch, theirs: KVLayout) -> None:
        """Refuse a peer that has read other weights, once it is known of what tensor. The end that was dialled asks."""
        if peer.dialled or not is_findable(error, self._layout, theirs):
            self._reject(peer, error)
        else:
            peer.difference = error
            peer.post(wire.encode(told(self._tensors, "")))

    def _compare(self, peer: Peer, message: wire.Compare) -> None:
        """Read what a peer tells of a part of its weights. Raises TransferError when it goes on for ever, or was not
        asked."""
        peer.num_compared += 1
        if peer.num_compared > MAX_COMPARES or not (peer.dialled or peer.difference):
            raise TransferError(f"{peer.link.endpoint} compares weights out of turn")
        if peer.difference is not None and (fields := found(self._tensors, message)):
            self._reject(peer, LayoutMismatch.of((*peer.difference.fields, *fields)))
        else:
            peer.post(wire.encode(answer(self._tensors, message)))

    def _admit(self, peer: Peer, message: wire.Hello | wire.Welcome) -> Peer | None:
        """Open the link. Return the guest that has to give way for it, if there is one.

        There is one link per identity. If there were two, closing either would look like proof that the peer has
        stopped writing, while it still writes over the other. A Welcome is queued first, so that no frame from another
        thread overtakes it."""
        with self._book.changed:
            key = peer_key(message.address)
            if self._book.peer_at(key) is not None:
                why = "this peer has an open link already; drop that one before opening another"
                raise Occupied(why, message.address)
            if isinstance(message, wire.Hello):
                if self._book.is_dialling(key) and peer_key(self._book.us) < key:
                    raise Occupied("both ends dial, and it is the other one's link that stays")
                peer.queue(wire.encode(wire.Welcome(self._book.us, self._layout)))
            return self._book.admit(peer, message.address, message.layout)

    def _reject(self, peer: Peer, error: PDInferError) -> None:
        """Refuse the link. An end that dialled is told why and closes it; if it goes on instead, this end closes it."""
        self._book.refuse(peer, error)
        if not peer.dialled:
            is_occupied = isinstance(error, Occupied)
            peer.post(wire.rejection(error, again=is_occupied, refuser=self._book.us if is_occupied else None))


class ChannelLinks:
    """The links of one channel: it opens, keeps and closes those in `book`."""

    def __init__(self, transport: Transport, book: LinkBook, handshake: Handshake) -> None:
        self.book = book
        self.handshake = handshake
        self._transport = transport
        self._changed = book.changed
        self._clock = book.clock

    def tick(self, step_age_s: float) -> None:
        """Send a heartbeat on every open link, give up the links that are silent, and dial the missing peers."""
        now, beat = self._clock(), wire.encode(wire.Beat(step_age_s))
        with self._changed:
            peers = self.book.peers()
            self.book.forget_past(now)
        for peer in peers:
            silent_s = peer.silence.look(now, heard_ago_s=now - peer.link.heard_at)
            if peer.address is None:
                if peer.dialled and peer.refusal is not None:
                    self.book.abandon(peer)
                elif now - peer.since > HANDSHAKE_S:
                    reason = f"{peer.link.endpoint} did not finish its handshake in {HANDSHAKE_S:g} s"
                    self.book.give_up(peer, reason)
            elif silent_s > LINKS.silent_s:
                reason = f"nothing came from {peer.link.endpoint} for {silent_s:.1f} s"
                self.book.give_up(peer, f"{reason}: it hangs, is frozen or cannot be reached")
            else:
                peer.post(beat)
        self.redial()

    # -- dialling ---------------------------------------------------------------------------------------------------

    def connect(self, address: PeerAddress, *, timeout_s: float) -> None:
        key = peer_key(address)
        if key == peer_key(self.book.us):
            raise TransferError("this is the end's own address; a channel has no link to itself")
        with self._changed:
            if self.book.peer_at(key) is not None:
                return
            is_new = key not in self.book.wanted
            wanted = self.book.want(address, timeout_s)
        if timeout_s <= 0:
            self._redial(wanted)
            return
        try:
            self._reach(wanted, timeout_s)
        except BaseException:
            if is_new:
                self.book.wanted.pop(key, None)
            raise

    @typed
    def dial(self, endpoint: str, *, timeout_s: float = 10.0) -> PeerAddress:
        """Open a link to whoever listens at `endpoint` ("tcp://host:port"), compare layouts, and return who it is. When
        there is a link to that peer, whatever name it was dialled by, the peer is returned at once. For hosts that know
        where a peer is and not which one: without a key on both ends anyone may answer. Raises LayoutMismatch and
        TransferError as `KVChannel.connect` does."""
        timeout_s = min(timeout_s, MAX_WAIT_S)
        anyone, ends = PeerAddress(ANYONE, 0, 0, (endpoint,)), self._clock() + timeout_s
        occupied: Occupied | None = None
        while True:
            left, refuser = ends - self._clock(), None if occupied is None else occupied.there
            with self._changed:
                if (linked := self.book.linked_at(endpoint, refuser)) is not None:
                    return linked
            if occupied is not None and left <= 0:
                raise occupied
            peer = self._dial(anyone, max(0.0, left))
            problem = self._answer(peer, max(0.0, left))
            if problem is None and peer.address is not None:
                with self._changed:
                    self.book.forget_at(endpoint, peer.address)
                    self.book.want(peer.address, timeout_s)
                return peer.address
            if not isinstance(problem, Occupied):
                raise problem or TransferError(f"the link to {endpoint} was lost")
            occupied = problem
            with self._changed:  # both ends dial, the peer has another name too, or it still has a link that is lost
                self._changed.wait_for(partial(self.book.linked_at, endpoint, occupied.there), REDIAL_S[0])

    def drop(self, key: PeerKey) -> None:
        """Close the link to this peer, or the one that is being opened, and stop dialling it."""
        self.book.wanted.pop(key, None)
        for peer in [peer for peer in self.book.peers() if peer.key == key]:
            peer.fence()

    def redial(self) -> None:
        for key, wanted in list(self.book.wanted.items()):
            if self._clock() - wanted.lost_at <= RELINK_S or self.book.peer_at(key) is not None:
                self._redial(wanted)
            else:
                log.warning("a peer could not be reached for %g s and is not dialled again", RELINK_S)
                self.book.wanted.pop(key, None)

    def _reach(self, wanted: Wanted, timeout_s: float) -> None:
        """Dial until there is a link to the peer, whichever end dialled it."""
        key, left = peer_key(wanted.address), timeout_s
        while True:
            problem = self._answer(self._dial(wanted.address, left, wanted), left)
            with self._changed:
                if isinstance(problem, Occupied):
                    self._changed.wait_for(lambda: self.book.peer_at(key) is not None, REDIAL_S[0])
                    left -= REDIAL_S[0]
                if problem is None or self.book.peer_at(key) is not None:
                    return
            if not isinstance(problem, Occupied) or left <= 0:
                raise problem

    def _answer(self, peer: Peer, timeout_s: float) -> PDInferError | None:
        """Wait for the end of the handshake. Return None when the link is open; otherwise close it and return why."""
        with self._changed:
            self._changed.wait_for(lambda: not peer.is_pending or self.book.peer_at(peer.key) is not None, timeout_s)
            if peer.address is not None:
                return None
            problem = peer.refusal
        self.book.abandon(peer)
        return problem or TransferError(f"{peer.link.endpoint} did not answer the handshake within {timeout_s} s")

    def _redial(self, wanted: Wanted) -> None:
        """Dial the peer if it is due, without waiting for the answer."""
        key, now, (low, high) = peer_key(wanted.address), self._clock(), REDIAL_S
        with self._changed:
            if self.book.wanted.get(key) is not wanted or self.book.peer_at(key) is not None:
                return
            if now < wanted.due or self.book.is_dialling(key):
                return
            wanted.due = now + min(high, low * 2.0 ** min(wanted.attempts, 32))  # of 1024 there is no float
            wanted.attempts += 1
        try:
            self._dial(wanted.address, 0.0, wanted)
        except TransferError as error:
            log.info("a peer cannot be dialled: %s", error)

    def _dial(self, address: PeerAddress, timeout_s: float, wanted: Wanted | None = None) -> Peer:
        """Dial a peer, because of a wish if there is one, and return the record of the link.

        The peer's first frame may arrive before `connect` returns and it is known who should answer. So this end
        introduces itself from the thread that comes second: this one, or the one that reads that frame."""
        key, peer = peer_key(address), self.book.at(self._transport.connect(address.endpoints, timeout_s=timeout_s))
        with self._changed:
            if self.book.peer_at(key) is not None:
                self.book.refuse(peer, Occupied("the peer has dialled this end meanwhile"))
            elif wanted is not None and self.book.wanted.get(key) is not wanted:
                self.book.refuse(peer, TransferError("the peer was dropped while it was dialled"))
            if peer.refusal is not None:
                return peer
            peer.asked_for = address
            has_session = peer.has_session
        self.handshake.open(peer)
        if has_session:
            self.handshake.introduce(peer)
        return peer
