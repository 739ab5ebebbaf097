"""Places orders, and publishes an event for each in the same transaction."""

import json
import os
import sys
import uuid
from contextlib import suppress

from bson.binary import Binary, UuidRepresentation
from bson.timestamp import Timestamp
from pymongo import MongoClient
from pymongo.write_concern import WriteConcern


def main() -> None:
    with MongoClient(os.environ["MONGODB_URI"]) as client:
        db = client[os.environ["MONGODB_DATABASE"]]
        for number in range(int(sys.argv[1])):
            # with_transaction repeats the transaction after a temporary error. The relay sends an event once a
            # majority of the replica set has its transaction.
            with client.start_session() as session, suppress(Rejected):
                session.with_transaction(
                    lambda s: place_order(db, s, number), write_concern=WriteConcern("majority")
                )


class Rejected(Exception):
    pass


def place_order(db, session, number: int) -> None:
    order = {"number": number, "cents": 100 * number}
    db.orders.insert_one({"_id": number, **order}, session=session)

    db.outbox.insert_one(
        {
            # Without STANDARD, some drivers store a form that depends on the language.
            "_id": Binary.from_uuid(uuid.uuid4(), UuidRepresentation.STANDARD),
            "aggregatetype": "order",
            "aggregateid": f"customer-{number % 20}",  # events of one customer keep their order
            "type": "OrderPlaced",
            "payload": json.dumps(order, separators=(",", ":")),
            "contenttype": "application/json",
            "headers": [{"k": "language", "v": "python"}],
            "ts": Timestamp(0, 0),  # the server inserts its own time
        },
        session=session,
    )

    # An error aborts the transaction, which then publishes nothing.
    if number % 10 == 9:
        raise Rejected


if __name__ == "__main__":
    main()
