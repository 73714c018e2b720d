"""Communication between two processes of one run: authenticated, encrypted, and without pickle.

It carries heals (the state of a living group to a joiner), keepers' snapshot parts and parity, the requests to the
lighthouse's gate, and the watch over peers.

    door      listens, and admits connections of processes that hold the run's token
    channel   messages and byte ranges over an admitted connection
    sealing   encryption, which also binds each record to its channel, direction and position

The protocol of a connection:

1. Handshake. The server sends magic bytes and 32 random bytes. The client answers with 32 bytes that name the subject
   of the connection (`subject`), 32 random bytes, and an HMAC-SHA256 under the run's token over all of these and the
   name of the server's service (`purpose`). The server checks the HMAC in constant time and answers with another one,
   so each side knows that the other holds the token. The token is never sent. Before the server has checked the HMAC,
   it parses no byte of the client and starts no thread for it. The handshake may take HANDSHAKE_TIMEOUT in all.
2. Token, random bytes and direction yield two keys that no other connection has. Every record is sealed with them.
3. Frames are records with a JSON object. Its meaning is up to the caller.
4. Ranges: the client sends `{"op": "read", "offset": o, "length": n}`. The server answers with chunks, records that
   begin with their offset. A refusal may come in place of any chunk.

An attacker without the token who can read and alter all packets between two members can break a transfer, but nothing
else. There is no forward secrecy: an attacker who recorded a transfer and later gets the token can decrypt it.
"""

from everstep.wire.channel import Bytes as Bytes
from everstep.wire.channel import Channel as Channel
from everstep.wire.channel import Pieces as Pieces
from everstep.wire.channel import RefusedError as RefusedError
from everstep.wire.channel import WireError as WireError
from everstep.wire.channel import parse_address as parse_address
from everstep.wire.channel import pull as pull
from everstep.wire.channel import serve_ranges as serve_ranges
from everstep.wire.door import Door as Door
from everstep.wire.door import Server as Server
from everstep.wire.door import connect as connect
