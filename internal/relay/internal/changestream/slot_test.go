package changestream

import (
	"reflect"
	"testing"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/changes"
)

// Without slots the pipeline must not change, because its hash is in the stored positions.
func TestN28_OneSlotChangesNoPipeline(t *testing.T) {
	t.Parallel()
	for _, patterns := range [][]string{{"shop.outbox"}, {"shop.outbox", "shop.orders"}, {"tenant_*.outbox"}} {
		s, err := changes.ParseScope(patterns, "outrelay.*")
		if err != nil {
			t.Fatal(err)
		}

		one := s.Of(slot.Range{I: 0, N: 1})
		if !reflect.DeepEqual(s.Pipeline(), one.Pipeline()) || s.PipelineHash() != one.PipelineHash() {
			t.Errorf("%v: the pipeline of one slot differs", patterns)
		}

		// The hash shows whether all slots have one configuration.
		for _, p := range append(slot.Ranges(2), slot.Ranges(3)...) {
			if s.Of(p).PipelineHash() != s.PipelineHash() {
				t.Errorf("%v: slot %v has another hash", patterns, p)
			}
		}
	}
	if s, _ := changes.ParseScope([]string{"shop.outbox"}, "outrelay.*"); s.PipelineHash() != wholeHash {
		t.Errorf("hash of a collection stream is %s, want %s", s.PipelineHash(), wholeHash)
	}
}

// wholeHash is the hash in the documents of existing relays.
const wholeHash = "113c0e9f25e8cc2922074a57b98ea808"
