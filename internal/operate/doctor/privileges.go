package doctor

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/rights"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Resource is the resource of a privilege.
type Resource = rights.Resource

// access contains the privileges of the user.
type access struct{ rights.Access }

// lacking returns the parts of privileges that the user lacks, also as texts.
func (a access) lacking(privileges []Privilege) (missing []Privilege, named []string) {
	for _, p := range privileges {
		if denied := a.Missing(p.Resource, p.Actions...); len(denied) > 0 {
			p.Actions = denied
			missing = append(missing, p)
			named = append(named, p.String())
		}
	}
	return missing, named
}

// grant returns the statement that grants the missing privileges.
func (a access) grant(missing ...Privilege) string {
	list := make([]rights.Grant, len(missing))
	for i, p := range missing {
		list[i] = rights.Grant{Resource: p.Resource, Actions: p.Actions}
	}
	return a.FormatGrant(list...)
}

func (a access) grantCluster(action string) string {
	return a.grant(clusterPrivilege("", "", action))
}

// explainRejection returns the finding for a read that MongoDB rejected.
func (a access) explainRejection(err error) finding {
	if privilegeErr, ok := errors.AsType[*mongodb.PrivilegeError](err); ok {
		on := Resource{Cluster: privilegeErr.On == "cluster"}
		if !on.Cluster {
			on.DB, on.Collection, _ = strings.Cut(privilegeErr.On, ".")
		}
		actions := strings.Split(strings.ReplaceAll(privilegeErr.Action, " and ", ", "), ", ")
		return unchecked(a.grant(Privilege{Resource: on, Actions: actions}),
			"the user lacks the action %s on %s", privilegeErr.Action, on)
	}

	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return unchecked("", "the user lacks a privilege; grant the missing privileges listed above")
	}
	return unchecked("", "MongoDB returns: %v", err)
}

// privilegeChecks check the privileges of the user in MongoDB.
type privilegeChecks struct{ *examination }

// checkAccess reads the user's privileges, including those of inherited roles, and checks whether
// access control is enabled.
func (x privilegeChecks) checkAccess(ctx context.Context) finding {
	if err := x.readAccess(ctx); err != nil {
		return failed("", "reading the privileges of the user failed: %v", err)
	}

	access := x.mongo.access
	switch {
	case access.Off:
		return passed("access control is off: every user is allowed everything")
	case len(access.Logins) == 0:
		return noLogin()
	}
	return passed("logged in, with %d privileges from %d roles", len(access.Grants), access.Roles)
}

func noLogin() finding { return failed(connect.NoLoginFix, "%s", connect.NoLogin) }

// readAccess reads the user's privileges, and whether access control is enabled.
func (x privilegeChecks) readAccess(ctx context.Context) error {
	found, err := rights.Read(ctx, state.Open(x.mongo.client, x.cfg.State).Collection("watchers"))
	if err == nil {
		x.mongo.access = access{found}
	}
	return err
}

// checkPrivileges fails if a needed action is missing, and warns if a wanted action is missing.
func (x privilegeChecks) checkPrivileges(needed, wanted []Privilege) finding {
	if x.mongo.access.Off {
		return passed("access control is off")
	}

	missing, said := x.mongo.access.lacking(needed)
	softly, saidSoftly := x.mongo.access.lacking(wanted)
	fix := ""
	if all := slices.Concat(missing, softly); len(all) > 0 {
		// A longer fix would hide the reason on a terminal.
		fix = x.mongo.access.grant(all[:min(len(all), 20)]...)
	}
	switch {
	case len(missing) > 0:
		return failed(fix, "missing: %s", joinFew(slices.Concat(said, saidSoftly), 8))
	case len(softly) > 0:
		return warned(fix, "missing: %s", joinFew(saidSoftly, 8))
	}

	return passed("%s", describePrivileges(needed, wanted))
}

func describePrivileges(needed, wanted []Privilege) string {
	list := slices.Concat(needed, wanted)
	if len(list) == 0 {
		return "no privileges are needed yet"
	}
	var said []string
	for _, d := range list {
		said = append(said, d.String())
	}
	return joinFew(said, 3)
}

// checkStreamPrivileges checks the change stream, which is opened on a collection, a database or the
// cluster.
func (x privilegeChecks) checkStreamPrivileges(context.Context) finding {
	db, coll := x.scope.Target()
	return x.checkPrivileges([]Privilege{privilegeOn(db, coll, "", "find", "changeStream")}, nil)
}

func (x privilegeChecks) checkOutboxPrivileges(context.Context) finding {
	var needed, wanted []Privilege
	databases := map[string]bool{}
	for _, ns := range x.watchedCollections() {
		db, coll, _ := strings.Cut(ns, ".")
		needed = append(needed, privilegeOn(db, coll, "", "find"))
		if writesOutboxes(x.cfg) {
			needed[len(needed)-1].Actions = readWrite
		}
		if x.cfg.Purge.TTL > 0 {
			wanted = append(wanted, privilegeOn(db, coll, "", indexActions[1:]...))
		}
		if !databases[db] {
			databases[db] = true
			wanted = append(wanted, privilegeOn(db, "", "", "listCollections"))
		}
	}

	return x.checkPrivileges(needed, wanted)
}

func (x privilegeChecks) checkDeadPrivileges(context.Context) finding {
	maker := roleMaker{cfg: x.cfg, who: RolesFor{Inbox: inbox.DefaultCollection}}
	maker.cfg.Watch = x.watchedCollections()
	return x.checkPrivileges(nil, maker.handlerLetterPrivileges())
}

func (x privilegeChecks) checkStatePrivileges(context.Context) finding {
	needed, alike := x.listStatePrivileges()
	if alike {
		return x.checkPrivileges(needed, nil)
	}
	// Without them, an administrator has to run outrelay setup for each version.
	wanted := roleMaker{cfg: x.cfg}.onState("", "createCollection", "createIndex", "listIndexes")
	return x.checkPrivileges(needed, wanted)
}

// listStatePrivileges is [connect.StateRights] as privileges.
func (x privilegeChecks) listStatePrivileges() (needed []Privilege, alike bool) {
	grants, alike := connect.StateRights(x.cfg, &x.mongo.access.Access)
	for _, grant := range grants {
		needed = append(needed, Privilege{Resource: grant.Resource, Actions: grant.Actions})
	}
	return needed, alike
}

// requireRights is [connect.RequireRights] as an *[Unusable].
func (x privilegeChecks) requireRights(ctx context.Context) error {
	err := connect.RequireRights(ctx, x.cfg, x.scope, x.mongo.client)
	if missing, ok := errors.AsType[*connect.MissingRightsError](err); ok {
		return &Unusable{"MongoDB", missing.Detail, missing.Fix, true}
	}
	return err
}

// checkState checks that the state database is the relay's own, and complete.
func (x privilegeChecks) checkState(ctx context.Context) finding {
	db := state.Open(x.mongo.client, x.cfg.State)
	if err := db.Check(ctx); err != nil {
		return failed("set state.prefix or state.database to another value", "%v", err)
	}

	missing, err := db.Missing(ctx)
	switch {
	case err != nil:
		return x.mongo.access.explainRejection(err)
	case len(missing) == 0:
		return passed("%s has all collections with the prefix %s", db.Name(), db.Prefix())
	case !x.mongo.access.Off && len(x.mongo.access.Missing(Resource{DB: db.Name(), Collection: db.Names()[1]}, "createCollection", "createIndex")) > 0:
		return warned("run outrelay setup with an administrator's user, or these statements:\n"+joinLines(missing, 40),
			"%d collections and indexes are missing, and the user may not create them", len(missing))
	}
	return passed("the first start creates the collections with the prefix %s in %s", db.Prefix(), db.Name())
}

func (x privilegeChecks) checkClusterPrivileges(context.Context) finding {
	if x.mongo.hello.mongos() {
		return x.checkPrivileges(nil, nil)
	}
	return x.checkPrivileges(nil, []Privilege{clusterPrivilege("", "", "serverStatus", "replSetGetConfig")})
}

// watchedCollections returns the existing collections, and all collections that are configured without
// a pattern.
func (x privilegeChecks) watchedCollections() []string {
	var out []string
	for _, o := range x.mongo.outboxes.list {
		out = append(out, o.NS())
	}

	for _, ns := range x.cfg.Watch {
		if !strings.ContainsAny(ns, "*?") && !slices.Contains(out, ns) {
			out = append(out, ns)
		}
	}

	slices.Sort(out)
	return out
}
