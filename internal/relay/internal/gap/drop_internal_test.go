package gap

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// The stream of a cluster contains the drop of each database. It concerns no watched collection, whose own drop comes before, so
// it must not wait for the events on their way.
func TestTheDropOfADatabaseDoesNothing(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	cfg.Watch = []string{"tenant-*.outbox"}
	scope, err := changes.ParseScope(cfg.Watch)
	if err != nil {
		t.Fatal(err)
	}

	// Any other use of the recovery panics.
	recovery := &Recovery{Scope: scope, Plan: &Plan{Config: &cfg, AppendEvent: func(_ context.Context, kind nodes.Kind, fields bson.D) {
		t.Errorf("the audit log got an entry %s %v", kind, fields)
	}}}
	for _, db := range []string{"other", "tenant-1"} {
		if _, err := recovery.HandleDDL(t.Context(), &changes.Event{Op: changes.DropDatabase, DB: []byte(db)}); err != nil {
			t.Error(err)
		}
	}
}
