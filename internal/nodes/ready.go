package nodes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/state"
)

// ErrOlderNodes is the error for a migration that must wait, because live nodes do not support it and could do
// harm after it.
var ErrOlderNodes = errors.New("nodes of an older version are alive")

// NewStepCheck returns the function that a [migrate.Migrator] calls before a step that older versions cannot
// work with. The function returns [ErrOlderNodes] if a live node does not support the step. An owner of a
// lease counts as live even if it is not in the list of nodes. A call makes two majority reads.
func NewStepCheck(state state.Database) func(ctx context.Context, s migrate.Step) error {
	return func(ctx context.Context, s migrate.Step) error {
		list, err := NewNodes(mongodb.Majority(state.Collection("nodes"))).List(ctx)
		if err != nil {
			return err
		}
		owners, err := leaseOwners(ctx, state)
		if err != nil {
			return err
		}

		number := migrate.StepNumber(s.ID)
		var older []string
		knows := map[string]bool{}
		for _, n := range list {
			knows[n.Node] = n.Schema >= number
			if n.Schema < number && n.Alive(StaleAfter) {
				older = append(older, describeNode(n.Node, n.Version))
			}
		}
		// A process that owns a lease works, whether or not it is in the list.
		for node, version := range owners {
			owner := describeNode(node, version)
			if !knows[node] && !slices.Contains(older, owner) {
				older = append(older, owner)
			}
		}

		if len(older) > 0 {
			slices.Sort(older)
			return fmt.Errorf("%w: migration %s (%s) waits, because these live nodes are older than the migration: %s; "+
				"upgrade or stop them, and the migration continues", ErrOlderNodes, s.ID, s.Name, strings.Join(older, ", "))
		}
		return nil
	}
}

func describeNode(node, version string) string {
	if version == "" {
		version = "unknown version"
	}
	return node + " (" + version + ")"
}

// leaseOwners returns the nodes whose leases have not expired, with their versions.
func leaseOwners(ctx context.Context, state state.Database) (map[string]string, error) {
	coll := mongodb.Majority(state.Collection("watchers"))
	type watcher struct {
		Owner   string `bson:"owner"`
		Node    string `bson:"node"`
		Version string `bson:"version"`
	}
	alive := bson.D{{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$expiresAt", "$$NOW"}}}}}
	found, err := mongodb.FindAll[watcher](ctx, coll, "reading the owners of the watchers in "+state.Name(), alive)
	if err != nil {
		return nil, err
	}

	owners := map[string]string{}
	for _, w := range found {
		if w.Owner != "" {
			owners[w.Node] = w.Version
		}
	}
	return owners, nil
}
