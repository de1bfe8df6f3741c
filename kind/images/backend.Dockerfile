# The demo backend, one static program.
FROM scratch
COPY collapser-backend /collapser-backend
USER 65532:65532
EXPOSE 50051 8080
ENTRYPOINT ["/collapser-backend"]
