package routing

import (
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
)

// Debezium is the preset for the records of Debezium's MongoEventRouter with its default settings.
const Debezium = "debezium"

type debezium struct{ defaults }

func (debezium) presetName() string  { return Debezium }
func (debezium) defaultJSON() string { return debeziumJSON }

// wrapsDocuments: Debezium writes a document as a text once it adds fields to the value.
func (debezium) wrapsDocuments() bool { return true }

// newFormat returns a format without headers: Debezium's records have no header but the id.
func (debezium) newFormat(PresetConfig) format { return addNoHeaders }

// addNoHeaders is the format of presets whose records have only the headers of the delivery's identity.
func addNoHeaders(*Filler, *envelope.View, *Meta, *record.Record) {}
