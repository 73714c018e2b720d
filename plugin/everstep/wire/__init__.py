"""Bytes between two processes of one run: authenticated, encrypted, and without pickle.

The heal transport (a live group's state to a joiner), the keepers (snapshot parts and parity), the lighthouse's gate
and the watch over peers speak this.

    door      listens, and lets in who holds the run's token
    channel   messages and byte ranges over a connection that was let in
    sealing   what makes them fit for no other channel, direction or place in it, and unreadable

A connection, from its first byte:

1. Server: magic and 32 random bytes. Client: 32 bytes that say what the connection is for (`subject`), 32 random bytes,
   and an HMAC-SHA256 with the run's token over all of these and the name of the server's service (`purpose`). The
   server checks it in constant time and answers with another one, so that either side knows that the other holds the
   token. The token itself never travels. Before this nothing of a peer is parsed, no thread is started for it, and it
   has HANDSHAKE_TIMEOUT in all.
2. From token, nonces and direction come two keys that no other connection has. Every record is sealed with them.
3. Frames: records that are JSON objects. What they mean is the caller's business.
4. Ranges: the client asks for `{"op": "read", "offset": o, "length": n}`; the server answers with chunks, records with
   their offset in front, or with a refusal in place of any of them.

Who can read and alter every packet between two members, but has no token, can end a transfer and nothing else. The keys
follow from the token: who has recorded a transfer and gets hold of the token later can read it then.
"""

from everstep.wire.channel import Bytes as Bytes
from everstep.wire.channel import Channel as Channel
from everstep.wire.channel import Pieces as Pieces
from everstep.wire.channel import RefusedError as RefusedError
from everstep.wire.channel import WireError as WireError
from everstep.wire.channel import encoded as encoded
from everstep.wire.channel import parse_address as parse_address
from everstep.wire.channel import pull as pull
from everstep.wire.channel import serve_ranges as serve_ranges
from everstep.wire.door import Door as Door
from everstep.wire.door import Server as Server
from everstep.wire.door import connect as connect
