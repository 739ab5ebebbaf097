package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/operate/doctor"
)

func newRolesCommand(program *program) *cobra.Command {
	var asJSON bool
	var only string
	var who doctor.RolesFor
	cmd := &cobra.Command{
		Use:   "roles",
		Short: "Print scripts that create the least privileges in MongoDB and Kafka",
		Long: `Print a mongosh script and kafka-acls.sh commands for the configured collections, state database and
topics. The script creates the roles of the relay, of outrelay setup, of services that
append, schedule or consume, of operators and of readers. The commands create the ACLs of the relay.

This command connects to no server. The configuration needs only the keys that the roles depend on.
Some options need more privileges (purge.ttl, dead_letters.expire, topics.create): run the command
again after a change. To find missing privileges of existing roles, run outrelay doctor.
The commands need the name of the relay's Kafka login: kafka.sasl.username or --principal.

  outrelay roles --only mongodb | mongosh "$ADMIN_URI"
  outrelay roles --only kafka   | sh

Managed services have other formats: --only atlas prints custom roles for the Atlas
Administration API, one in a line, --only confluent commands of the confluent CLI, with the id of a
service account as principal, and --only msk policies of AWS IAM for Amazon MSK.`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			cfg, err := program.loadWithoutServers()
			if err != nil {
				return err
			}

			if asJSON {
				roles, err := doctor.NewRoles(cfg, who)
				if err != nil {
					return err
				}
				return printJSON(program.out, roles)
			}

			text, err := doctor.FormatRoles(cfg, who, only)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(program.out, text)
			return err
		},
	}

	flags := cmd.Flags()
	flags.BoolVar(&asJSON, "json", false, "print one JSON object on standard output")
	flags.StringVar(&only, "only", "", "mongodb, kafka, atlas, confluent or msk; default: mongodb and kafka")
	flags.StringVar(&who.Prefix, "prefix", "outrelay", "prefix of the role `names`")
	flags.StringSliceVar(&who.Databases, "consumer-database", nil, "`databases` of the consuming services; default: consumers.databases and the watched ones")
	flags.StringVar(&who.Inbox, "inbox", "", "`collection` of their inbox; default: inbox")
	flags.StringSliceVar(&who.Sagas, "saga", nil, "`collections` of their sagas")
	flags.StringVar(&who.Principal, "principal", "",
		"the relay's Kafka `principal`, such as User:relay or User:CN=relay; default: the SASL user")
	flags.StringVar(&who.Group, "group", "", "consumer `group`; adds the ACLs of consumers")
	flags.StringVar(&who.Consumer, "consumer-principal", "", "the consumers' Kafka `principal`, such as User:shipping; --group needs it")
	return cmd
}

// loadWithoutServers is loadConfig for a command that connects to no server: the addresses may be missing, and the secrets may be on
// another machine.
func (p *program) loadWithoutServers() (config.Config, error) {
	load := func() (config.Config, error) {
		cfg, _, err := config.LoadWithoutSecrets(p.configFile, p.env, p.flagSettings())
		p.nameSources(err)
		return cfg, err
	}
	cfg, err := load()
	if err == nil {
		return cfg, nil
	}
	problems, ok := errors.AsType[*config.Problems](err)
	if !ok {
		return cfg, err
	}

	// Load again with placeholders for the missing addresses. If that fails too, report the first
	// error: it also lists the missing addresses.
	env := p.env
	defer func() { p.env = env }()
	// Roles depend on the watched collections and topics, not on addresses, so any valid address will do.
	const brokers = "kafka.brokers"
	areMissing := false
	placeholders := map[string]string{"mongodb.uri": "mongodb://mongodb", brokers: "broker:9092"}
	for _, problem := range problems.List {
		name := config.EnvName(problem.Path)
		placeholder, known := placeholders[problem.Path]
		if known && envValue(env, name) == "" {
			areMissing = areMissing || problem.Path == brokers
			p.env = append(p.env[:len(p.env):len(p.env)], name+"="+placeholder)
		}
	}

	if cfg, second := load(); second == nil {
		// The commands for Kafka contain the brokers, and must not contain a placeholder.
		if areMissing {
			cfg.Kafka.Brokers = nil
		}
		return cfg, nil
	}
	return cfg, err
}
