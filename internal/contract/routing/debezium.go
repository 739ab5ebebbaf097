package routing

import (
	"cmp"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Debezium is the preset for the records of Debezium's MongoEventRouter with its default settings.
const Debezium = "debezium"

type debezium struct{ defaults }

func (debezium) presetName() string  { return Debezium }
func (debezium) defaultJSON() string { return debeziumJSON }
func (debezium) base64IDs() bool     { return true }

// wrapsDocuments: Debezium writes a document as a text once it adds fields to the value.
func (debezium) wrapsDocuments() bool { return true }

// fieldNames ignores the fields that the router ignores, unless n names them. The type remains, for rules and headers.
func (debezium) fieldNames(n envelope.Names) (names envelope.Names, java bool) {
	for _, name := range []*string{
		&n.Key, &n.Topic, &n.Partition, &n.Headers, &n.ContentType, &n.SchemaVersion, &n.Source, &n.Subject, &n.Time, &n.ExpiresAt,
	} {
		*name = cmp.Or(*name, envelope.NoField)
	}
	return n, true
}

// leadingHeaders returns the headers of Debezium's context, which the connector adds by default. The logical name is Debezium's topic.prefix, which has no default: a connector's
// name for its source, as the watcher's is. The run is another one after each start.
func (debezium) leadingHeaders(cfg PresetConfig) []record.Header {
	var list []record.Header
	for _, h := range [][2]string{
		{"connectorLogicalName", cfg.Watcher}, {"taskId", "0"}, {"connectorName", "mongodb"}, {"runId", uuid.NewString()},
	} {
		list = append(list, record.Header{Key: []byte("__debezium.context." + h[0]), Value: []byte(h[1])})
	}
	return list
}

// newFormat returns a format without headers: Debezium's records have no header but those of the context and the id.
func (debezium) newFormat(PresetConfig) format { return addNoHeaders }

// addNoHeaders is the format of presets whose records have only the headers of the delivery's identity.
func addNoHeaders(*Filler, *envelope.View, *Meta, *record.Record) error { return nil }
