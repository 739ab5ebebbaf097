//! Places orders, and publishes an event for each in the same transaction.

use mongodb::bson::{doc, Document, Timestamp, Uuid};
use mongodb::error::{Error, Result};
use mongodb::options::WriteConcern;
use mongodb::sync::{Client, ClientSession, Database};
use serde_json::json;
use std::env;

/// The reason of a transaction that publishes nothing.
struct Rejected;

fn main() -> Result<()> {
    let uri = env::var("MONGODB_URI").expect("MONGODB_URI is not set");
    let name = env::var("MONGODB_DATABASE").expect("MONGODB_DATABASE is not set");
    let orders = env::args()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("the argument is a number of orders");

    let client = Client::with_uri_str(uri)?;
    let db = client.database(&name);
    for number in 0..orders {
        // and_run repeats the transaction after a temporary error. The relay sends an event once a majority of the
        // replica set has its transaction.
        let mut session = client.start_session().run()?;
        let placed = session
            .start_transaction()
            .write_concern(WriteConcern::majority())
            .and_run(|s| place_order(&db, s, number));
        match placed {
            Err(e) if e.get_custom::<Rejected>().is_none() => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

fn place_order(db: &Database, session: &mut ClientSession, number: i64) -> Result<()> {
    let order = doc! { "_id": number, "number": number, "cents": 100 * number };
    db.collection::<Document>("orders")
        .insert_one(order)
        .session(&mut *session)
        .run()?;

    let event = doc! {
        "_id": Uuid::new(), // stored with subtype 4, the same for every language
        "aggregatetype": "order",
        "aggregateid": format!("customer-{}", number % 20), // events of one customer keep their order
        "type": "OrderPlaced",
        "payload": json!({ "number": number, "cents": 100 * number }).to_string(),
        "contenttype": "application/json",
        "headers": [{ "k": "language", "v": "rust" }],
        "ts": Timestamp { time: 0, increment: 0 }, // the server inserts its own time
    };
    db.collection::<Document>("outbox")
        .insert_one(event)
        .session(&mut *session)
        .run()?;

    // An error aborts the transaction, which then publishes nothing.
    if number % 10 == 9 {
        return Err(Error::custom(Rejected));
    }
    Ok(())
}
