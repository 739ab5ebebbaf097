package routing

import (
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

var (
	hType          = []byte(record.HeaderType)
	hAggregateType = []byte(record.HeaderAggregateType)
	hAggregateID   = []byte(record.HeaderAggregateID)
	hContentType   = []byte(record.HeaderContentType)
	hSchemaVersion = []byte(record.HeaderSchemaVersion)
	hSource        = []byte(record.HeaderSource)
	hSubject       = []byte(record.HeaderSubject)
	hTime          = []byte(record.HeaderTime)
)

// Plain is the preset with each field of the envelope as a header.
const Plain = "plain"

type plain struct{ defaults }

func (plain) presetName() string            { return Plain }
func (plain) newFormat(PresetConfig) format { return addPlainHeaders }

// addPlainHeaders adds each field of the envelope as a header.
func addPlainHeaders(f *Filler, v *envelope.View, _ *Meta, _ *record.Record) error {
	f.addOptionalHeader(hType, v.Type)
	f.addOptionalHeader(hAggregateType, v.AggregateType)
	f.addOptionalHeader(hAggregateID, v.AggregateID)
	f.addOptionalHeader(hContentType, v.ContentType)
	f.addOptionalHeader(hSchemaVersion, v.SchemaVersion)
	f.addOptionalHeader(hSource, v.Source)
	f.addOptionalHeader(hSubject, v.Subject)
	if v.HasTime {
		f.addHeader(hTime, f.formatTime(v.Time))
	}
	return nil
}
