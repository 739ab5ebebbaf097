package consumer

import (
	"reflect"
	"testing"
)

// TestZeroIsTheDefaultOfEachOption: a service passes on a value of its configuration, which is zero if it is not
// set.
func TestZeroIsTheDefaultOfEachOption(t *testing.T) {
	t.Parallel()
	want := newSettings(nil)
	for name, o := range map[string]Option{
		"WithConcurrency": WithConcurrency(0), "WithDrain": WithDrain(0), "WithBuffer": WithBuffer(0), "WithTimeout": WithTimeout(0),
		"WithSharedTransaction": WithSharedTransaction(0), "WithLimit": WithLimit(0), "WithCommitInterval": WithCommitInterval(0), "WithCommitCount": WithCommitCount(0),
		"WithRetention": WithRetention(0), "WithLease": WithLease(0), "WithCollections": WithCollections(""), "WithMode": WithMode(0),
		"WithSessionTimeout": WithSessionTimeout(0), "WithClientID": WithClientID(""), "WithRack": WithRack(""), "WithStart": WithStart(0),
		"WithTLS": WithTLS(nil), "WithTelemetry": WithTelemetry(nil), "WithLogger": WithLogger(nil), "WithDecoder": WithDecoder(nil),
		"WithErrorHook": WithErrorHook(nil), "WithTopicList": WithTopicList(nil),
	} {
		got := newSettings([]Option{o})

		// Functions cannot be compared.
		if (got.decoder == nil) != (want.decoder == nil) {
			t.Errorf("%s: the decoder is missing", name)
		}
		got.decoder, got.open = nil, nil
		plain := want
		plain.decoder, plain.open = nil, nil

		if !reflect.DeepEqual(got, plain) { //nolint:govet // neither has an error, see below
			t.Errorf("%s with zero changes the settings:\n%+v\n%+v", name, got, plain)
		}

		if len(got.problems) > 0 {
			t.Errorf("%s with zero: %v", name, got.problems)
		}
	}
}
