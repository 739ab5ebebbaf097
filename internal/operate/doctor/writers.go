package doctor

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/rights"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// login is a user of a database.
type login = rights.Login

// mostUsers bounds the users whose privileges are read.
const mostUsers = 500

// checkWriters names the other users who may write to the state database or to an outbox: the relay trusts both.
func (x privilegeChecks) checkWriters(ctx context.Context) finding {
	if x.mongo.access.Off {
		return passed("access control is off")
	}
	users, err := x.listUsers(ctx)
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return passed("the user may not list other users (viewUser on all databases); run doctor as an administrator to have them checked")
	}
	if err != nil {
		return x.mongo.access.explainRejection(err)
	}

	// The state database is the relay's own. Services write to outboxes, so their users are no finding.
	var administrators, strangers, services []string
	kept := Resource{DB: x.cfg.State.Database, Collection: state.NamesWith(x.cfg.State.Prefix)[0]}
	for _, u := range users {
		switch {
		case slices.Contains(x.mongo.access.Logins, u.Login):
		case u.mayWrite(Resource{DB: everyDatabase, Collection: everyDatabase}):
			administrators = append(administrators, u.Login.String())
		case u.mayWrite(kept):
			strangers = append(strangers, u.Login.String())
		case slices.ContainsFunc(x.watchedCollections(), func(ns string) bool {
			db, coll, _ := strings.Cut(ns, ".")
			return u.mayWrite(Resource{DB: db, Collection: coll})
		}):
			services = append(services, u.Login.String())
		}
	}

	detail := fmt.Sprintf("others who may write: to %s: %s; to outboxes: %s; to all databases: %s", x.cfg.State.Database,
		listOrNone(strangers), listOrNone(services), listOrNone(administrators))
	if len(strangers) == 0 {
		return passed("%s", detail)
	}
	return warned(fmt.Sprintf("revoke their roles with write access to %s", x.cfg.State.Database), "%s", detail)
}

// everyDatabase is the name of no database, so only a privilege on all databases covers it.
const everyDatabase = "\x00"

func listOrNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return joinFew(names, 8)
}

// user is a login with its privileges, including those of inherited roles.
type user struct {
	Login      login           `bson:",inline"`
	Privileges []rights.Stored `bson:"inheritedPrivileges"`
}

func (u user) mayWrite(resource Resource) bool {
	var access rights.Access
	for _, p := range u.Privileges {
		access.Add(p)
	}
	return len(access.Missing(resource, "insert", "update", "remove")) < 3
}

// listUsers returns the users of all databases. The server does not return the privileges of all users at once.
func (x privilegeChecks) listUsers(ctx context.Context) ([]user, error) {
	var names struct {
		Users []login `bson:"users"`
	}
	all := bson.D{{Key: "usersInfo", Value: bson.D{{Key: "forAllDBs", Value: true}}}}
	if err := x.mongo.runAdminCommand(ctx, all, &names); err != nil || len(names.Users) == 0 {
		return nil, err
	}

	var found struct {
		Users []user `bson:"users"`
	}
	some := names.Users[:min(len(names.Users), mostUsers)]
	err := x.mongo.runAdminCommand(ctx, bson.D{{Key: "usersInfo", Value: some}, {Key: "showPrivileges", Value: true}}, &found)
	return found.Users, err
}
