package outboxes_test

import (
	"errors"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/outboxes"
)

func TestANameIsInspected(t *testing.T) {
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

	for name, want := range map[string]string{"plain": "", "capped": "", "missing": "", "view": "it is a view of plain", "series": "it is a time series"} {
		capped, err := outboxes.Inspect(t.Context(), db.Client(), db.Name(), name)
		if capped != (name == "capped") || errors.Is(err, outboxes.ErrUnwatchable) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: capped %v, %v", name, capped, err)
		}
	}
}
