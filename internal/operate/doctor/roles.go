package doctor

import (
	"fmt"
	"strings"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/mongodb/rights"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Privilege is a MongoDB privilege: of a role, or granted to the user, needed or missing.
type Privilege struct {
	Resource Resource `json:"resource"`
	Actions  []string `json:"actions"`
	Why      string   `json:"why,omitempty"`
	// Optional describes what does not work without the privilege. "" means that it is required.
	Optional string `json:"optional,omitempty"`
}

func (p Privilege) String() string {
	return rights.Grant{Resource: p.Resource, Actions: p.Actions}.String()
}

// statement returns the privilege in the syntax of mongosh.
func (p Privilege) statement() string {
	return rights.Grant{Resource: p.Resource, Actions: p.Actions}.Statement()
}

// Role is a role of the MongoDB database admin.
type Role struct {
	Name       string      `json:"role"`
	For        string      `json:"for"`
	Privileges []Privilege `json:"privileges"`
}

// ACL allows one user of Kafka operations on one resource.
type ACL struct {
	For        string   `json:"for"`       // relay or consumer
	Principal  string   `json:"principal"` // User:name; "" if neither the options nor the configuration contain it
	Resource   string   `json:"resource"`  // topic, transactional-id or group
	Name       string   `json:"name"`
	Pattern    string   `json:"pattern"` // literal or prefixed
	Operations []string `json:"operations"`
	Why        string   `json:"why"`
}

// Roles are the minimal privileges of each user of a deployment.
type Roles struct {
	MongoDB []Role `json:"mongodb"`
	Kafka   []ACL  `json:"kafka"`
}

// RolesFor selects the users that get roles in addition to the relay.
type RolesFor struct {
	Prefix    string   // of the roles' names; defaults to outrelay
	Databases []string // of the services that consume; empty takes those of consumers.databases, and of watch without a pattern
	Inbox     string   // the collection of the inbox; defaults to inbox
	Sagas     []string // the collections of sagas
	Group     string   // Kafka's consumer group; empty leaves consumers out of the ACLs
	Principal string   // the relay's, User:name; empty takes the SASL user of the configuration
	Consumer  string   // the consumers' principal, User:name
}

// The users of [ACL.For].
const (
	forRelay    = "relay"
	forConsumer = "consumer"
)

// FormatRoles returns the roles and ACLs that follow from the configuration, in the format of a tool: mongodb (mongosh), kafka
// (kafka-acls.sh), atlas, confluent or msk. "" stands for the first two in one text. It connects to no server. The formats of Kafka do not
// depend on watch, and fail if the name of a user is not known.
func FormatRoles(cfg config.Config, who RolesFor, format string) (string, error) {
	switch format {
	case "kafka":
		return newKafkaRoles(cfg, who).Commands(cfg.Kafka.Brokers)
	case "confluent":
		return newKafkaRoles(cfg, who).ConfluentCommands()
	case "msk":
		return newKafkaRoles(cfg, who).MSKPolicies(), nil
	case "mongodb", "atlas", "":
	default:
		return "", fmt.Errorf("roles: --only is %q; expected mongodb, kafka, atlas, confluent or msk", format)
	}

	roles, err := NewRoles(cfg, who)
	if err != nil {
		return "", err
	}
	switch format {
	case "mongodb":
		return roles.Script(), nil
	case "atlas":
		return roles.AtlasRoles(), nil
	}

	// The header of each half is a comment in its language, so that a user can copy either half.
	commands, err := roles.Commands(cfg.Kafka.Brokers)
	if err != nil {
		commands = fmt.Sprintf("# no ACLs: %v\n", err)
	}
	return "// ---- MongoDB, for mongosh (alone: --only mongodb)\n" + roles.Script() +
		"\n# ---- Kafka, for a shell (alone: --only kafka)\n" + commands, nil
}

// NewRoles derives the roles from the configuration, without a connection to any server. They satisfy
// the checks of privileges and ACLs. The tests run the relay with them.
func NewRoles(cfg config.Config, who RolesFor) (Roles, error) {
	scope, err := changes.ParseScope(cfg.Watch, cfg.State.Pattern())
	if err != nil {
		return Roles{}, fmt.Errorf("watch: %w", err)
	}

	if who.Prefix == "" {
		who.Prefix = "outrelay"
	}
	if who.Inbox == "" {
		who.Inbox = inbox.DefaultCollection
	}
	maker := &roleMaker{cfg: cfg, scope: scope, who: who}
	roles := newKafkaRoles(cfg, who)
	roles.MongoDB = []Role{maker.relayRole(), maker.setupRole(), maker.serviceRole(), maker.schedulerRole(), maker.consumerRole(), maker.operatorRole(), maker.readerRole()}
	return roles, nil
}

// newKafkaRoles derives the ACLs only, which do not depend on watch.
func newKafkaRoles(cfg config.Config, who RolesFor) Roles {
	return Roles{Kafka: (&roleMaker{cfg: cfg, who: who}).listACLs()}
}

// Script returns a script for mongosh that creates the roles, or updates them if they exist.
func (r Roles) Script() string {
	var builder strings.Builder
	builder.WriteString("// For mongosh, as a user who may manage roles: mongosh \"$URI\" roles.js\n" +
		"const admin = db.getSiblingDB(\"admin\");\n" +
		"const make = (role, privileges) => admin.getRole(role) ? admin.updateRole(role, {privileges, roles: []}) : admin.createRole({role, privileges, roles: []});\n")
	for _, role := range r.MongoDB {
		fmt.Fprintf(&builder, "\n// %s\nmake(%q, [\n", role.For, role.Name)
		for _, p := range role.Privileges {
			why := p.Why
			if p.Optional != "" {
				why += " (optional: " + p.Optional + ")"
			}
			fmt.Fprintf(&builder, "  // %s\n  %s,\n", why, p.statement())
		}

		builder.WriteString("]);\n")
	}

	builder.WriteString("\n// Then a user for each, such as:\n// admin.createUser({user: \"relay\", pwd: passwordPrompt(), roles: [\"" + r.MongoDB[0].Name + "\"]})\n")
	return builder.String()
}
