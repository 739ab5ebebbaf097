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
func addPlainHeaders(filler *Filler, view *envelope.View, _ *Meta, _ *record.Record) error {
	filler.addOptionalHeader(hType, view.Type)
	filler.addOptionalHeader(hAggregateType, view.AggregateType)
	filler.addOptionalHeader(hAggregateID, view.AggregateID)
	filler.addOptionalHeader(hContentType, view.ContentType)
	filler.addOptionalHeader(hSchemaVersion, view.SchemaVersion)
	filler.addOptionalHeader(hSource, view.Source)
	filler.addOptionalHeader(hSubject, view.Subject)
	if view.HasTime {
		filler.addHeader(hTime, filler.formatTime(view.Time))
	}
	return nil
}
