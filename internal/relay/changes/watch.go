package changes

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
)

// Watch opens a change stream over the scope. It reads with majority, whatever the client does. pref is nil for that of the client. It
// may change opts. The driver sends the time that ctx has left as the limit of the statement.
func (s *Scope) Watch(
	ctx context.Context, client *mongo.Client, pref *readpref.ReadPref, pipeline mongo.Pipeline, opts *options.ChangeStreamOptionsBuilder,
) (*mongo.ChangeStream, error) {
	majorityDatabase := func(name string) *mongo.Database {
		return client.Database(name, options.Database().SetReadConcern(readconcern.Majority()).SetReadPreference(pref))
	}

	switch s.kind {
	case Collection:
		return majorityDatabase(s.db).Collection(s.coll).Watch(ctx, pipeline, opts)
	case Database:
		return majorityDatabase(s.db).Watch(ctx, pipeline, opts)
	default:
		// The same as Client.Watch, but with our read concern.
		return majorityDatabase("admin").Watch(ctx, pipeline,
			opts.SetCustomPipeline(bson.M{"allChangesForCluster": true}))
	}
}

// PrivilegeResource returns the resource document for the grant.
func (s *Scope) PrivilegeResource() string {
	switch s.kind {
	case Collection:
		return fmt.Sprintf(`{db: %q, collection: %q}`, s.db, s.coll)
	case Database:
		return fmt.Sprintf(`{db: %q, collection: ""}`, s.db)
	default:
		return `{db: "", collection: ""}`
	}
}
