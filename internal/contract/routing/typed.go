package routing

import (
	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Typed is the default preset: the record of [Debezium] with a header for the type, and documents on one line.
const Typed = "typed"

type typed struct{ defaults }

func (typed) presetName() string { return Typed }

func (typed) newFormat(PresetConfig) format {
	return func(filler *Filler, view *envelope.View, _ *Meta, _ *record.Record) error {
		filler.addOptionalHeader(hType, view.Type)
		return nil
	}
}
