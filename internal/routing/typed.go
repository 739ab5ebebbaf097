package routing

import (
	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
)

var hType = []byte(record.HeaderType)

// typed is Debezium's record with an additional header for the type.
type typed struct{}

func (typed) addTo(f *Filler, v *envelope.View, _ *Meta, _ *record.Record) {
	f.addHeader(hType, v.Type)
}
