package routing

import (
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
)

// debezium is the record of Debezium's MongoEventRouter with its defaults: it has no header but the id.
type debezium struct{}

func (debezium) addTo(*Filler, *envelope.View, *Meta, *record.Record) {}
