package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/envelope"
)

func newSchemaCommand(program *program) *cobra.Command {
	return newGroup(&cobra.Command{
		Use:   "schema",
		Short: "Print the schema of the configuration file or of an envelope",
		Long: `Print the JSON Schema of the configuration file, or the schema of an envelope for services that do not use
pkg/outbox. docs/envelope.md explains its fields. The command connects to no server and needs no
configuration.`,
	},
		&cobra.Command{
			Use:   "config",
			Short: "Print the JSON Schema of the configuration file",
			Args:  noArgs,
			RunE: func(*cobra.Command, []string) error {
				_, err := program.out.Write(config.Schema())
				return err
			},
		},
		&cobra.Command{
			Use:   "envelope",
			Short: "Print a JSON Schema of an envelope in Extended JSON",
			Long: `Print a JSON Schema (draft 2020-12) of an envelope in Extended JSON, for editors and for the tests of a
service.`,
			Args: noArgs,
			RunE: func(*cobra.Command, []string) error { return printSchema(program.out, envelope.JSONSchema()) },
		},
		&cobra.Command{
			Use:   "validator",
			Short: "Print a validator for an outbox collection",
			Long: `Print a validator for an outbox collection. MongoDB then rejects an envelope at its insert that the
relay would turn into a dead letter. It permits everything that the relay writes.`,
			Example: `  outrelay schema validator > validator.json
  mongosh "$MONGODB_URI" --eval 'db.runCommand({ collMod: "outbox",
    validator: EJSON.parse(fs.readFileSync("validator.json", "utf8")) })'`,
			Args: noArgs,
			RunE: func(*cobra.Command, []string) error {
				return printSchema(program.out, bson.D{{Key: "$jsonSchema", Value: envelope.Validator()}})
			},
		})
}

// printSchema prints a document as JSON on several lines.
func printSchema(writer io.Writer, doc bson.D) error {
	text, err := bson.MarshalExtJSON(doc, false, false)
	if err != nil {
		return fmt.Errorf("encoding the schema: %w", err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, text, "", "  "); err != nil {
		return fmt.Errorf("indenting the schema: %w", err)
	}
	_, err = fmt.Fprintln(writer, out.String())
	return err
}
