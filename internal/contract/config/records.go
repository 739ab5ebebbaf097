package config

// Mapping names the fields of the documents that hold the parts of an envelope, for outboxes that other
// programs write. A name is a field at the top level of the document; several parts may share a field. -
// means that the documents have no such part. The defaults are the names of docs/envelope.md.
type Mapping struct {
	// ID is the field with the id of the record. If it is not _id, records also have the header
	// outrelay-id with the _id, by which the relay recognizes them. Defaults to _id.
	ID string `yaml:"id"`
	// AggregateType is the field with the kind of the object. Without one, topics.template must not use
	// {aggregatetype}. Defaults to aggregatetype.
	AggregateType string `yaml:"aggregatetype"`
	// AggregateID is the field with the key of records whose document has no key. Without one, their key
	// is the _id. Defaults to aggregateid.
	AggregateID string `yaml:"aggregateid"`
	// Key is the field with the key of the record. * is the key of the document, {"_id": …}, as the
	// MongoDB Kafka connector writes it. Defaults to key.
	Key string `yaml:"key"`
	// Type is the field with the name of the event. Defaults to type.
	Type string `yaml:"type"`
	// Payload is the field with the value of the record. * is the whole document, without the fields of
	// the relay. Defaults to payload.
	Payload string `yaml:"payload"`
	// Timestamp is the field with the timestamp of the record: a date, or milliseconds since 1970.
	// Defaults to none: the time of the commit, which is never older than the retention of the topic.
	Timestamp string `yaml:"timestamp"`
	// Topic is the field with the topic, instead of the one that topics selects. Defaults to topic.
	Topic string `yaml:"topic"`
	// Partition is the field with the partition. Defaults to partition.
	Partition string `yaml:"partition"`
	// Headers is the field with the headers: an array of {k, v}, or a document of texts. Defaults to headers.
	Headers string `yaml:"headers"`
	// ContentType is the field with the media type of the payload. Defaults to contenttype.
	ContentType string `yaml:"contenttype"`
	// SchemaVersion is the field with the version of the payload's schema. Defaults to schemaversion.
	SchemaVersion string `yaml:"schemaversion"`
	// Source is the field with the CloudEvents source. Defaults to source.
	Source string `yaml:"source"`
	// Subject is the field with the CloudEvents subject. Defaults to subject.
	Subject string `yaml:"subject"`
	// Time is the field with the date of the event. Defaults to time.
	Time string `yaml:"time"`
	// ExpiresAt is the field with the date after which the event is not sent. Defaults to expiresAt.
	ExpiresAt string `yaml:"expires_at"`
}

// Topics selects the topics of each envelope.
type Topics struct {
	// Template is the topic of an envelope that matches no rule and names no topic. {aggregatetype} and
	// {type} are replaced by these fields, {database} and {collection} by the place of the document,
	// {header:x} by a header of the envelope, and {field:x} by any field of the document, such as
	// {field:customer.region}. If a header or a field is missing, the envelope becomes a dead letter.
	// Defaults to outbox.event.{aggregatetype}, with record.preset kafka-connector to
	// {database}.{collection}.
	Template string `yaml:"template"`
	// Rules are tried in order, and the first match decides. A rule with several topics sends one
	// record to each; the envelope is delivered when all records are acknowledged. Defaults to none.
	Rules []Rule `yaml:"rules"`
	// Allow lists the topics that may be written, with * and ?. It protects against envelopes that name
	// a wrong topic. Kafka's internal topics (two leading underscores) are never allowed. Empty allows
	// all other topics. Defaults to empty.
	Allow []string `yaml:"allow" form:"topic"`
	// Max limits the number of different topics that envelopes may name during one ownership. The
	// topics that template and rules name in full do not count. Envelopes for further topics become
	// dead letters. Without a limit, a service could fill the relay's memory with topics that do not
	// exist. Defaults to 5000, with topics.create to 500.
	Max int `yaml:"max"`
	// Create creates missing topics. Unset never creates a topic: envelopes for a missing topic wait,
	// and status shows the fix.
	Create *Create `yaml:"create"`
}

// Rule sends the matching envelopes to one or several topics.
type Rule struct {
	Match Match `yaml:"match"`
	// To is the topic, or a list of topics, with the placeholders of template. Required. A rule
	// with drop has none.
	To []string `yaml:"to"`
	// Drop discards the matching envelopes, also those that name a topic, and counts them in
	// outrelay_dropped_total. Defaults to false.
	Drop bool `yaml:"drop"`
}

// Match selects the envelopes of a rule. * matches any characters and ? matches one.
type Match struct {
	// AggregateType is a pattern for the envelope's aggregatetype. Empty matches all.
	AggregateType string `yaml:"aggregatetype"`
	// Type is a pattern for the envelope's type. Empty matches all.
	Type string `yaml:"type"`
	// Database is a pattern for the database of the document. Empty matches all.
	Database string `yaml:"database"`
	// Collection is a pattern for the collection of the document. Empty matches all.
	Collection string `yaml:"collection"`
	// Headers are patterns for headers of the envelope, by name. An envelope without the header does not
	// match. Defaults to none.
	Headers map[string]string `yaml:"headers"`
	// Fields are patterns for fields of the document, by name. A document without the field does not
	// match. Defaults to none.
	Fields map[string]string `yaml:"fields"`
}

// Create holds the settings of new topics.
type Create struct {
	// Partitions is the number of partitions of a new topic; 0 uses the brokers' default. Defaults to 0.
	Partitions int `yaml:"partitions"`
	// Replication is the replication factor of a new topic; 0 uses the brokers' default. Defaults to 0.
	Replication int `yaml:"replication"`
	// Configs are topic settings such as retention.ms, with Kafka's names. Defaults to none.
	Configs map[string]string `yaml:"configs"`
}

// Record is the format of the Kafka records.
type Record struct {
	// Preset is the set of headers. typed is Debezium's record with an additional header for the type,
	// by which consumers select a handler. debezium is the record of Debezium's
	// MongoEventRouter with the header outrelay-ns. It ignores the fields that the router ignores, such as headers, key and topic,
	// unless mapping names them. cloudevents adds ce_ headers and content-type. plain adds each field of the
	// envelope as a header.
	// kafka-connector publishes whole documents of any shape, as the MongoDB Kafka connector does with
	// publish.full.document.only: it changes the defaults of mapping, topics.template and json.
	// Defaults to typed.
	Preset string `yaml:"preset" enum:"typed,debezium,cloudevents,plain,kafka-connector"`
	// Structured sends the CloudEvent with its payload as one JSON document in the value. It requires
	// the preset cloudevents. Defaults to false: binary mode, which sends the payload byte for byte.
	Structured bool `yaml:"structured"`
	// Source is the CloudEvents source of envelopes that name none. Defaults to /<database>/<collection>.
	Source string `yaml:"source"`
	// Headers are added to each record after the preset's headers and before the envelope's own.
	// {aggregatetype}, {aggregateid}, {type}, {contenttype}, {schemaversion}, {source}, {subject}, {time},
	// {database}, {collection}, {header:x} and {field:x} are replaced. Headers with an empty value are
	// left out. Defaults to none.
	Headers map[string]string `yaml:"headers"`
	// Placement adds fields of the document, in the syntax of Debezium's additional.placement: tenant:header
	// adds a header, and tenant:value adds a member to the value, which becomes a JSON object with the
	// payload in payload. A third part is the name there: tenant:header:tenant-id. envelope means value. A
	// missing field is left out. Defaults to none.
	Placement []string `yaml:"placement"`
	// JSON is how payloads that are documents or arrays are written. extended is relaxed Extended JSON on
	// one line. plain has no types: ids and dates are texts. debezium is what Debezium's router writes,
	// canonical Extended JSON on several lines, and the text of a Java list for an array. connector is
	// what the MongoDB Kafka connector writes. auto is debezium for the preset debezium, connector for
	// kafka-connector, and extended for the others. Defaults to auto.
	JSON string `yaml:"json" enum:"auto,extended,plain,debezium,connector"`
}
