// Package migrate moves real publishers to outrelay under load: Debezium and the MongoDB Kafka connector on Kafka Connect, and
// outbox-event-bus on Node. docs/migrate describes the same steps for users.
package migrate
