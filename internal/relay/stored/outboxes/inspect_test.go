package outboxes_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func TestNamesAreInspected(t *testing.T) {
	t.Parallel()
	db := database(t)
	for name, o := range map[string]*options.CreateCollectionOptionsBuilder{
		"plain":  options.CreateCollection(),
		"capped": options.CreateCollection().SetCapped(true).SetSizeInBytes(4096),
		"series": options.CreateCollection().SetTimeSeriesOptions(options.TimeSeries().SetTimeField("at")),
	} {
		if err := db.CreateCollection(t.Context(), name, o); err != nil {
			t.Fatal(err)
		}
	}
	if err := db.CreateView(t.Context(), "view", "plain", mongo.Pipeline{}); err != nil {
		t.Fatal(err)
	}

	all := func(_, _ []byte) bool { return true }
	l, err := outboxes.List(t.Context(), db.Client(), all, db.Name())
	if err != nil || len(l.Outboxes) != 2 || l.Outboxes[0].Coll != "capped" || l.Outboxes[1].Coll != "plain" {
		t.Fatalf("%+v, %v", l.Outboxes, err)
	}

	for _, c := range []struct {
		pattern string
		kinds   []outboxes.Kind
		cause   string
		fatal   bool
	}{
		{pattern: "plain"},
		{"capped", []outboxes.Kind{outboxes.IsCapped}, "it is capped", false},
		{"view", []outboxes.Kind{outboxes.IsView}, "it is a view of " + db.Name() + ".plain", true},
		{"series", []outboxes.Kind{outboxes.IsTimeSeries}, "it is a time series", true},
		{"missing", []outboxes.Kind{outboxes.IsMissing}, "it does not exist yet", false},
		{"mis*", []outboxes.Kind{outboxes.IsMissing}, "no collection matches it yet", false},
		{"*", []outboxes.Kind{outboxes.IsCapped, outboxes.IsTimeSeries, outboxes.IsView}, "it is capped", false},
	} {
		var of outboxes.Listing
		wants := func(_, coll []byte) bool { return c.pattern == "*" || c.pattern == string(coll) }
		if of, err = outboxes.List(t.Context(), db.Client(), wants, db.Name()); err != nil {
			t.Fatal(err)
		}

		var kinds []outboxes.Kind
		found := of.Inspect([]string{db.Name() + "." + c.pattern})
		for _, f := range found {
			kinds = append(kinds, f.Kind)
			if f.Fatal != c.fatal || f.Fix == "" {
				t.Errorf("%s: %+v", c.pattern, f)
			}
		}
		if !slices.Equal(kinds, c.kinds) {
			t.Errorf("%s: %v, want %v", c.pattern, kinds, c.kinds)
		}
		if len(found) > 0 {
			if err := found[0].Err(); !errors.Is(err, outboxes.ErrUnwatchable) || !strings.Contains(err.Error(), c.cause) {
				t.Errorf("%s: %v", c.pattern, err)
			}
		}
	}
}
