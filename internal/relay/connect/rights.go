package connect

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb/rights"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// ReadWrite are the actions on a collection whose documents the relay owns.
var ReadWrite = []string{"find", "insert", "update", "remove"}

// MissingRightsError reports that the user of MongoDB lacks rights without which no event is delivered.
type MissingRightsError struct {
	Detail string // the user and the rights
	Fix    string // the commands that grant them
}

func (e *MissingRightsError) Error() string {
	return "MongoDB cannot be used: " + e.Detail + "; " + e.Fix
}

// rightsTimeout bounds the read of the rights. A server that is away decides later, when the relay uses them.
const rightsTimeout = 10 * time.Second

// RequireRights returns a [*MissingRightsError] if the user of client lacks a right without which no event is delivered. It returns nil
// if nothing is missing, or if the rights cannot be read now.
func RequireRights(ctx context.Context, cfg config.Config, scope *changes.Scope, client *mongo.Client) error {
	ctx, cancel := context.WithTimeout(ctx, rightsTimeout)
	defer cancel()
	access, err := rights.Read(ctx, state.Open(client, cfg.State).Collection("watchers"))
	if err != nil || access.Off {
		return nil
	}
	if len(access.Logins) == 0 {
		return &MissingRightsError{NoLogin, NoLoginFix}
	}

	// The purge and records of deliveries need more. Without these rights, events are delivered, and the relay reports the problem.
	db, coll := scope.Target()
	needed := []rights.Grant{{Resource: rights.Resource{DB: db, Collection: coll}, Actions: []string{"find", "changeStream"}}}
	for _, ns := range cfg.Watch {
		database, collection, _ := strings.Cut(ns, ".")
		on := rights.Resource{DB: database, Collection: collection}
		if !glob.HasWildcard(ns) && on != needed[0].Resource {
			needed = append(needed, rights.Grant{Resource: on, Actions: []string{"find"}})
		}
	}
	ofState, _ := StateRights(cfg, &access)
	missing := access.Lacking(slices.Concat(needed, ofState))
	// A server that does not list privileges decides when the relay uses them.
	if len(missing) == 0 || len(access.Grants) == 0 {
		return nil
	}
	return newMissingRights(&access, missing)
}

// The problem of a connection without a user, and its fix.
const (
	NoLogin    = "the server has access control, but mongodb.uri names no user"
	NoLoginFix = "set the user and the password of the relay in mongodb.uri"
)

// newMissingRights returns the error for the rights that the user lacks.
func newMissingRights(access *rights.Access, missing []rights.Grant) error {
	const most = 3
	named := make([]string, len(missing))
	for i, grant := range missing {
		named[i] = grant.String()
	}
	detail := strings.Join(named[:min(len(named), most)], ", ")
	if more := len(named) - most; more > 0 {
		detail += fmt.Sprintf(" and %d more", more)
	}

	user := access.Logins[0]
	// For many rights, the whole role is shorter than a grant for each.
	fix := fmt.Sprintf("as an administrator, run: outrelay roles --only mongodb | mongosh \"$ADMIN_URI\", and in mongosh: "+
		"db.getSiblingDB(%q).grantRolesToUser(%q, [{role: \"outrelayRelay\", db: \"admin\"}])", user.DB, user.User)
	if access.Role != "" && len(missing) <= most {
		fix = "as an administrator, run in mongosh: " + access.FormatGrant(missing...) + " (outrelay roles --only mongodb prints the whole role)"
	}
	return &MissingRightsError{fmt.Sprintf("user %s lacks %s", user, detail), fix}
}

// StateRights returns the rights that the relay needs on its collections. If the user lacks the same actions on all of them, alike is
// true, and the rights are as `outrelay roles` grants them.
func StateRights(cfg config.Config, access *rights.Access) (needed []rights.Grant, alike bool) {
	name := cfg.State.Database
	collections := state.NamesWith(cfg.State.Prefix)
	first := access.Missing(rights.Resource{DB: name, Collection: collections[0]}, ReadWrite...)
	alike = len(first) > 0
	for _, coll := range collections {
		grant := rights.Grant{Resource: rights.Resource{DB: name, Collection: coll}, Actions: ReadWrite}
		needed = append(needed, grant)
		alike = alike && slices.Equal(first, access.Missing(grant.Resource, ReadWrite...))
	}

	// A right on the whole database would include the collections of services.
	if alike && !IsStateWatched(cfg) {
		needed = []rights.Grant{{Resource: rights.Resource{DB: name}, Actions: ReadWrite}}
	}
	return needed, alike
}

// IsStateWatched reports whether the state database is a database of watch, so that services use it too.
func IsStateWatched(cfg config.Config) bool {
	return slices.ContainsFunc(cfg.Watch, func(ns string) bool {
		db, _, _ := strings.Cut(ns, ".")
		return glob.Match(db, cfg.State.Database)
	})
}
