import com.mongodb.ConnectionString;
import com.mongodb.MongoClientSettings;
import com.mongodb.TransactionOptions;
import com.mongodb.WriteConcern;
import com.mongodb.client.ClientSession;
import com.mongodb.client.MongoClient;
import com.mongodb.client.MongoClients;
import com.mongodb.client.MongoDatabase;
import java.util.List;
import java.util.UUID;
import org.bson.BsonTimestamp;
import org.bson.Document;
import org.bson.UuidRepresentation;

/** Places orders, and publishes an event for each in the same transaction. */
public class Producer {
    public static void main(String[] args) {
        // Without STANDARD, the driver rejects UUIDs, and Spring stores a form that depends on the language.
        MongoClientSettings settings = MongoClientSettings.builder()
            .applyConnectionString(new ConnectionString(System.getenv("MONGODB_URI")))
            .uuidRepresentation(UuidRepresentation.STANDARD)
            .build();
        // The relay sends an event once a majority of the replica set has its transaction.
        TransactionOptions majority = TransactionOptions.builder().writeConcern(WriteConcern.MAJORITY).build();

        try (MongoClient client = MongoClients.create(settings)) {
            MongoDatabase db = client.getDatabase(System.getenv("MONGODB_DATABASE"));
            for (int i = 0; i < Integer.parseInt(args[0]); i++) {
                int number = i;
                // withTransaction repeats the transaction after a temporary error.
                try (ClientSession session = client.startSession()) {
                    session.withTransaction(() -> placeOrder(db, session, number), majority);
                } catch (Rejected e) {
                    // The order and its event do not exist.
                }
            }
        }
    }

    static class Rejected extends RuntimeException {}

    static Void placeOrder(MongoDatabase db, ClientSession session, int number) {
        Document order = new Document("number", number).append("cents", 100 * number);
        db.getCollection("orders").insertOne(session, new Document("_id", number).append("order", order));

        db.getCollection("outbox").insertOne(session, new Document("_id", UUID.randomUUID())
            .append("aggregatetype", "order")
            .append("aggregateid", "customer-" + number % 20) // events of one customer keep their order
            .append("type", "OrderPlaced")
            .append("payload", "{\"number\":" + number + ",\"cents\":" + 100 * number + "}")
            .append("contenttype", "application/json")
            .append("headers", List.of(new Document("k", "language").append("v", "java")))
            .append("ts", new BsonTimestamp(0, 0))); // the server inserts its own time

        // An exception aborts the transaction, which then publishes nothing.
        if (number % 10 == 9) {
            throw new Rejected();
        }
        return null;
    }
}
