package nodes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/store"
)

// ErrOlder is what an [*OlderError] is.
var ErrOlder = errors.New("nodes of an older version are alive")

// OlderError is a migration that has to wait: these nodes would do harm with what it leaves.
type OlderError struct {
	ID, Name string   // of the migration
	Nodes    []string // with their versions, as "node (version)"
}

func (e *OlderError) Error() string {
	return fmt.Sprintf("migration %s (%s) waits, because these live nodes do not know it: %s; upgrade or stop them, and it goes on by itself",
		e.ID, e.Name, strings.Join(e.Nodes, ", "))
}

// Is makes the error an [ErrOlder].
func (e *OlderError) Is(target error) bool { return target == ErrOlder }

// Ready makes what a [migrate.Migrator] asks before a step that older versions cannot work with: whether every node that
// lives knows it. Who owns a lease lives, whatever the list of nodes says. Two reads, with majority.
func Ready(state *mongo.Database) func(ctx context.Context, s migrate.Step) error {
	return func(ctx context.Context, s migrate.Step) error {
		list, err := store.NewNodes(store.Majority(state.Collection("nodes"))).List(ctx)
		if err != nil {
			return err
		}
		owners, err := leaseOwners(ctx, state)
		if err != nil {
			return err
		}
		number := migrate.Number(s.ID)
		var older []string
		known := map[string]bool{}
		for _, n := range list {
			known[n.Node] = n.Schema >= number
			if n.Schema < number && n.Alive(StaleAfter) {
				older = append(older, describeNode(n.Node, n.Version))
			}
		}
		for node, version := range owners {
			if one := describeNode(node, version); !known[node] && !slices.Contains(older, one) {
				older = append(older, one)
			}
		}
		if len(older) > 0 {
			slices.Sort(older)
			return &OlderError{ID: s.ID, Name: s.Name, Nodes: older}
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

// leaseOwners are the nodes whose leases have not expired, with their versions.
func leaseOwners(ctx context.Context, state *mongo.Database) (map[string]string, error) {
	coll := store.Majority(state.Collection("watchers"))
	cur, err := coll.Find(ctx, bson.D{{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$expiresAt", "$$NOW"}}}}})
	if err != nil {
		return nil, fmt.Errorf("reading who owns the watchers of %s: %w", state.Name(), err)
	}
	var found []struct {
		Owner   string `bson:"owner"`
		Node    string `bson:"node"`
		Version string `bson:"version"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return nil, fmt.Errorf("reading who owns the watchers of %s: %w", state.Name(), err)
	}
	out := map[string]string{}
	for _, w := range found {
		if w.Owner != "" {
			out[w.Node] = w.Version
		}
	}
	return out, nil
}
