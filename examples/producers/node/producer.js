// Places orders, and publishes an event for each in the same transaction.
const { MongoClient, ObjectId, Timestamp } = require("mongodb");

async function main() {
  const client = new MongoClient(process.env.MONGODB_URI);
  const db = client.db(process.env.MONGODB_DATABASE);
  const count = Number(process.argv[2]);

  for (let number = 0; number < count; number++) {
    // withTransaction repeats the transaction after a temporary error. The relay sends an event once a majority of
    // the replica set has its transaction.
    await client
      .withSession((session) =>
        session.withTransaction(() => placeOrder(db, session, number), { writeConcern: { w: "majority" } }),
      )
      .catch((error) => {
        if (!(error instanceof Rejected)) throw error;
      });
  }
  await client.close();
}

class Rejected extends Error {}

async function placeOrder(db, session, number) {
  const order = { number, cents: 100 * number };
  await db.collection("orders").insertOne({ _id: number, ...order }, { session });

  await db.collection("outbox").insertOne(
    {
      _id: new ObjectId(),
      aggregatetype: "order",
      aggregateid: `customer-${number % 20}`, // events of one customer keep their order
      type: "OrderPlaced",
      payload: JSON.stringify(order),
      contenttype: "application/json",
      headers: [{ k: "language", v: "node" }],
      ts: new Timestamp({ t: 0, i: 0 }), // the server inserts its own time
    },
    { session },
  );

  // An error aborts the transaction, which then publishes nothing.
  if (number % 10 === 9) throw new Rejected();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
