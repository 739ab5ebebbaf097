// Package producers contains programs in other languages that publish events by inserting envelopes, as docs/envelope.md
// describes. Each places orders in transactions, and aborts every tenth. Each needs MONGODB_URI and MONGODB_DATABASE, and
// takes the number of orders as its argument:
//
//	cd node   && npm install && node producer.js 1000
//	cd python && pip install -r requirements.txt && python3 producer.py 1000
//	cd java   && mvn dependency:copy-dependencies -DoutputDirectory=libs && java -cp 'libs/*' Producer.java 1000
//	cd rust   && cargo run --locked -- 1000
//
// There is no program in C#, because neither the .NET SDK nor the official driver was available to test it. docs/envelope.md
// applies to it, with GuidRepresentation.Standard for ids.
//
// The collections orders and outbox must exist if the database is sharded or older than MongoDB 4.4.
package producers
