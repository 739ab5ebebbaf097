package routing

import (
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// debezium is the record of Debezium's MongoEventRouter with its defaults: it has no header but the id.
type debezium struct{}

func (debezium) addTo(*Filler, *event.View, *Meta, *record.Record) {}
