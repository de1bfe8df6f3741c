# The load generator, one static program.
FROM scratch
COPY collapser-loadgen /collapser-loadgen
USER 65532:65532
ENTRYPOINT ["/collapser-loadgen"]
