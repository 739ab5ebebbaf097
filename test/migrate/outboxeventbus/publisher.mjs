// Publishes the events of a collection until SIGTERM.
import { KafkaPublisher } from "@outbox-event-bus/kafka-publisher";
import { MongoMongodbOutbox } from "@outbox-event-bus/mongo-mongodb-outbox";
import { Kafka } from "kafkajs";
import { MongoClient } from "mongodb";

const client = new MongoClient(process.env.MONGODB_URI);
const producer = new Kafka({ brokers: process.env.BROKERS.split(",") }).producer();
await producer.connect();

const outbox = new MongoMongodbOutbox({ client, dbName: process.env.MONGODB_DATABASE, pollIntervalMs: 50 });
let publish;
new KafkaPublisher({ subscribe: (_types, handler) => (publish = handler) }, { producer, topic: process.env.TOPIC }).subscribe(["*"]);
outbox.start(
  (event) => publish(event),
  (error) => console.error(error),
);
console.log("publishing");

process.on("SIGTERM", async () => {
  await outbox.stop();
  await producer.disconnect();
  await client.close();
});
