package bench

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/test/generated"
)

// comparisonMark begins the generated part of a page. It ends before the next chapter.
const comparisonMark = "<!-- from docs/bench-peers.json -->"

// TestTheReadmeQuotesTheRecordedComparison: the pages contain the figures of other publishers from the recorded run, and no others. The
// README has the publishers with their defaults, docs/bench.md all settings.
// After a new run, `go run ./test/regenerate` writes them.
func TestTheReadmeQuotesTheRecordedComparison(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/bench-peers.json")
	if err != nil {
		t.Fatal(err)
	}
	var r PeersResult
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}

	defaults := r
	defaults.Systems = slices.DeleteFunc(slices.Clone(r.Systems), func(s PeerSystem) bool {
		return !slices.Contains([]string{"outrelay", "debezium", "mongo-kafka"}, s.Name)
	})
	if len(defaults.Systems) != 3 {
		t.Fatalf("%d publishers with their defaults", len(defaults.Systems))
	}

	for file, table := range map[string]string{"README.md": " " + defaults.Markdown(), "docs/bench.md": "\n\n" + r.Markdown()} {
		text, err := os.ReadFile("../../../" + file)
		if err != nil {
			t.Fatal(err)
		}
		page := string(text)
		before, rest, begins := strings.Cut(page, comparisonMark)
		_, after, ends := strings.Cut(rest, "\n## ")
		if !begins || !ends {
			t.Errorf("%s has no %s before a chapter", file, comparisonMark)
			continue
		}

		generated.Check(t, file, before+comparisonMark+table+"\n## "+after)
	}
}
