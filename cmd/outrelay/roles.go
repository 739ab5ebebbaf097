package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/doctor"
)

func newRolesCommand(p *program) *cobra.Command {
	var asJSON bool
	var only string
	var who doctor.RolesFor
	c := &cobra.Command{
		Use:   "roles",
		Short: "Print the least privileges: a script for MongoDB, commands for Kafka",
		Long: `Print, for the configured collections, state database and topics, a script for mongosh that makes the roles of the relay,
of who migrates, of services that append, schedule or consume, of operators and of readers, and the kafka-acls.sh commands
for the relay. It asks no server, and needs of the configuration no more than what the roles are about. Options that are
turned on may need more (purge.ttl, dead_letters.expire, topics.create): print it again when they change. What is missing
where roles are made already, outrelay doctor says.

  outrelay roles --only mongodb | mongosh "$ADMIN_URI"
  outrelay roles --only kafka   | sh`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			cfg, err := p.loadWithoutServers()
			if err != nil {
				return err
			}
			r, err := doctor.NewRoles(cfg, who)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(p.out, r)
			}
			var text string
			switch only {
			case "mongodb":
				text = r.Script()
			case "kafka":
				text = r.Commands(cfg.Kafka.Brokers)
			case "":
				// Each half is a comment in the language of the other: either may be cut out.
				text = "// ---- MongoDB, for mongosh (alone: --only mongodb)\n" + r.Script() + "\n# ---- Kafka, for a shell (alone: --only kafka)\n" + r.Commands(cfg.Kafka.Brokers)
			default:
				return fmt.Errorf("roles: --only is %q; expected mongodb or kafka", only)
			}
			_, err = fmt.Fprint(p.out, text)
			return err
		},
	}
	f := c.Flags()
	f.BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	f.StringVar(&only, "only", "", "mongodb or kafka; default: both")
	f.StringVar(&who.Prefix, "prefix", "outrelay", "begin of the roles' `names`")
	f.StringSliceVar(&who.Databases, "consumer-database", nil, "`databases` of the services that consume; default: those that are watched")
	f.StringVar(&who.Inbox, "inbox", "", "`collection` of their inbox; default: inbox")
	f.StringSliceVar(&who.Sagas, "saga", nil, "`collections` of their sagas")
	f.StringVar(&who.Principal, "principal", "", "the relay's Kafka `principal`, such as User:relay or User:CN=relay; default: the SASL user")
	f.StringVar(&who.Group, "group", "", "consumer `group`, which adds the ACLs of consumers")
	f.StringVar(&who.Consumer, "consumer-principal", "", "the consumers' Kafka `principal`")
	return c
}

// loadWithoutServers is load for a command that asks no server: the addresses may be missing.
func (p *program) loadWithoutServers() (config.Config, error) {
	cfg, _, err := p.loadConfig()
	if err == nil {
		return cfg, nil
	}
	problems, ok := errors.AsType[*config.Problems](err)
	if !ok {
		return cfg, err
	}
	env := p.env
	defer func() { p.env = env }()
	for _, one := range problems.List {
		if nowhere := map[string]string{"mongodb.uri": "mongodb://mongodb", "kafka.brokers": "broker:9092"}[one.Path]; nowhere != "" && envValue(env, config.EnvName(one.Path)) == "" {
			p.env = append(p.env[:len(p.env):len(p.env)], config.EnvName(one.Path)+"="+nowhere)
		}
	}
	if cfg, _, second := p.loadConfig(); second == nil {
		return cfg, nil
	}
	return cfg, err
}
