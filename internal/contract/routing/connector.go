package routing

import (
	"cmp"

	"github.com/outrelay/outrelay/internal/contract/envelope"
)

// Connector is the preset for whole documents, as the MongoDB Kafka connector publishes them.
const Connector = "kafka-connector"

type connector struct{ defaults }

func (connector) presetName() string  { return Connector }
func (connector) defaultJSON() string { return connectorJSON }

func (connector) defaultTemplate() string {
	return "{" + kindDatabase + "}.{" + kindCollection + "}"
}

// fieldNames makes the document the payload as a whole. It has only the parts that n names.
func (connector) fieldNames(n envelope.Names) (names envelope.Names, java bool) {
	n.Payload = cmp.Or(n.Payload, envelope.WholeDocument)
	n.Key = cmp.Or(n.Key, envelope.WholeDocument)
	for _, name := range []*string{
		&n.AggregateType, &n.AggregateID, &n.Type, &n.Topic, &n.Partition, &n.Headers, &n.ContentType, &n.SchemaVersion, &n.Source,
		&n.Subject, &n.Time, &n.ExpiresAt,
	} {
		*name = cmp.Or(*name, envelope.NoField)
	}
	return n, false
}

// newFormat returns a format without headers. The connector's records have no headers at all, but a read-back needs the id.
func (connector) newFormat(PresetConfig) format { return addNoHeaders }
