package routing

import (
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

var hType = []byte(record.HeaderType)

// typed is Debezium's record with an additional header for the type.
type typed struct{}

func (typed) addTo(f *Filler, v *event.View, _ *Meta, _ *record.Record) { f.addHeader(hType, v.Type) }
